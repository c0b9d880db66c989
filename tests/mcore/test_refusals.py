"""Every refusal names the flags concerned and a value that would work; all come in one error."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from megatron_bp.mcore import refusals
from megatron_bp.mcore.arguments import config_from_args
from tests.mcore.parsing import parsed

CASES = {
    "--context-parallel-size 2 --block-parallel-size 3": (
        "--block-parallel-size 3 is not a multiple of --context-parallel-size 2; use "
        "--block-parallel-size 4, or 1 for conventional context parallelism"
    ),
    "--block-parallel-size 4": "8 processes",  # replaced below
    "--num-attention-heads 9 --num-query-groups 3 --tensor-model-parallel-size 2": (
        "--num-attention-heads 9 is not a multiple of --tensor-model-parallel-size 2; use "
        "--tensor-model-parallel-size 1"
    ),
    "--num-attention-heads 12 --num-query-groups 3 --tensor-model-parallel-size 2": (
        "--num-query-groups 3 and --tensor-model-parallel-size 2 do not divide one another"
    ),
    "--context-parallel-size 2 --bp-hierarchical-gather 3": (
        "--bp-hierarchical-gather 3 is a node that 2 clean shards of TP 1 ranks do not fill; use "
        "--bp-hierarchical-gather 2, or 0"
    ),
    "--tensor-model-parallel-size 2 --bp-hierarchical-gather 3": "use --bp-hierarchical-gather 2",
    "--attention-dropout 0.1": "use --attention-dropout 0",
    "--hidden-dropout 0.1": "use --hidden-dropout 0",
    "--hybrid-context-parallel": "drop --hybrid-context-parallel (dynamic context parallelism)",
    "--hierarchical-context-parallel-sizes 1 1": "drop --hierarchical-context-parallel-sizes",
    "--mtp-num-layers 1": "drop --mtp-num-layers",
    "--cuda-graph-impl local": "use --cuda-graph-impl none",
    "--tp-comm-overlap": "drop --tp-comm-overlap",
    "--enable-cuda-graph": "drop --enable-cuda-graph",
    "--external-cuda-graph": "drop --external-cuda-graph",
    "--fine-grained-activation-offloading --offload-modules core_attn": (
        "drop --fine-grained-activation-offloading, which empties tensors"
    ),
    "--cpu-offloading-num-layers 1": "use --recompute-granularity full",
    "--bp-recompute-attention keep": "add --recompute-granularity full --recompute-method uniform",
    "--bp-recompute-attention keep --recompute-granularity selective": "layers that run twice",
    "--bp-recompute-attention rerun --bp-clean-kv keep --recompute-granularity full": (
        "use --bp-clean-kv auto"
    ),
    "--attention-backend local": "use --attention-backend auto with --transformer-impl local",
    "--multi-latent-attention": "drop --multi-latent-attention",
    "--sft": "use --bdlm-data sft instead of --sft",
    "--dataloader-inter-document-masking": "use --reset-attention-mask",
    "--reset-position-ids": "say it with --document-positions restart",
    "--reset-attention-mask --micro-batch-size 2": "use --micro-batch-size 1",
    "--dataloader-type external": "single or cyclic",
    "--window-size 3,3": "--window-size 1023,0",
    "--position-embedding-type mrope": "use rope",
    "--num-experts 2 --calculate-per-token-loss": "drop --calculate-per-token-loss",
    "--spec a b": "drop --spec",
    "--cp-comm-type block_parallel": "add --no-bp-prune-last-layer",
    "--cp-comm-type block_parallel p2p --no-bp-prune-last-layer": "block_parallel for all layers",
    "--bdlm-ar-loss-weight 1 --clean-rule block_causal": (
        "--bdlm-objective standard cannot be trained as asked: objective 'standard': "
        "ar_loss_weight=1.0 needs clean_rule=token_causal"
    ),
    "--bdlm-canvas uniform": "use the preset llada2 with canvas=uniform",
    "--bdlm-noise-range 0.8,0.3": "t_min=0.8 and t_max=0.3 must satisfy 0 < t_min <= t_max <= 1",
    "--bdlm-objective llada2 --bdlm-ar-loss-weight 1 --clean-rule token_causal "
    "--calculate-per-token-loss": "scope=example (no --calculate-per-token-loss)",
    "--use-megatron-fsdp": "use --use-distributed-optimizer",
    "--qk-clip": "drop --qk-clip",
    "--load nowhere": "--load nowhere holds no checkpoint",
    "--pretrained-checkpoint nowhere": "--pretrained-checkpoint nowhere holds no checkpoint",
    "--load nowhere --save elsewhere": "--load nowhere holds no checkpoint",
}
CASES["--block-parallel-size 4"] = (
    "2 processes are not a multiple of TP 1 x PP 1 x context group 4 (= "
    "max(--context-parallel-size, --block-parallel-size)); start 4 processes"
)


@pytest.mark.parametrize("text", CASES)
def test_it_is_refused_with_a_value_that_would_work(text: str) -> None:
    args = parsed(text, num_ranks=12 if "size 3" in text else 2)
    with pytest.raises(ValueError, match=r"1 problem with the arguments") as error:
        refusals.refuse(args, config_from_args(args))
    assert CASES[text] in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--context-parallel-size 2 --block-parallel-size 2",
        "--context-parallel-size 2",
        "--context-parallel-size 2 --bp-hierarchical-gather 8 --bp-ownership contiguous",
        "--context-parallel-size 2 --no-bp-overlap --no-bp-windowed-exchange",
        "--seq-length 47",
        "--window-size 15,0 --window-attn-skip-freq 2",
        "--position-embedding-type yarn",
        "--num-experts 2",
        "--num-attention-heads 9 --num-query-groups 3",
        "--calculate-per-token-loss --use-distributed-optimizer",
        "--load folder --save folder",
        "--reset-attention-mask --eod-mask-loss",
        "--recompute-granularity full --bp-recompute-attention keep --bp-clean-kv keep",
        "--recompute-granularity full --bp-recompute-attention rerun",
        "--bp-clean-kv regather",
        "--fp8-format hybrid",
    ],
)
def test_what_works_is_not_refused(text: str) -> None:
    args = parsed(text, num_ranks=2)
    refusals.refuse(args, config_from_args(args))


def test_all_problems_come_in_one_error() -> None:
    args = parsed("--attention-dropout 0.1 --mtp-num-layers 1 --sft")
    with pytest.raises(ValueError, match="3 problems with the arguments"):
        refusals.refuse(args, config_from_args(args))


def test_a_folder_with_a_checkpoint_may_be_loaded(tmp_path: Path) -> None:
    (tmp_path / refusals.TRACKER).write_text("2")
    args = parsed(f"--load {tmp_path} --pretrained-checkpoint {tmp_path}")
    refusals.refuse(args, config_from_args(args))


@pytest.mark.parametrize("mask", [-1, 100, 101])
def test_a_mask_token_outside_the_vocabulary_is_refused(mask: int) -> None:
    (problem,) = refusals.vocabulary_problems(mask, 100, {})
    assert f"--mask-token-id {mask} is outside the vocabulary [0, 100)" in problem
    assert "unused id below 100" in problem


def test_a_mask_token_that_is_another_special_token_is_refused() -> None:
    """SmolLM2's tokenizer answers 0, its eos and unk, for an unknown mask token."""
    (problem,) = refusals.vocabulary_problems(0, 100, {"eos": 0, "unk": 0, "bos": 1})
    assert "--mask-token-id 0 is also the tokenizer's eos and unk token" in problem


def test_a_mask_token_of_its_own_is_accepted() -> None:
    assert refusals.vocabulary_problems(99, 100, {"eos": 0}) == []


SAVED = {
    "bdlm_objective": "standard",
    "block_size": 8,
    "mask_token_id": 120,
    "clean_rule": "preset",
}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("block_size", 16, "--block-size 8 differs from 16 in the checkpoint"),
        ("mask_token_id", 5, "--mask-token-id 120 differs from 5"),
        ("bdlm_objective", "fast_dllm_v2", "use --bdlm-objective fast_dllm_v2, or --finetune"),
        ("clean_rule", "block_causal", "--clean-rule preset differs from block_causal"),
    ],
)
def test_a_resume_with_another_objective_is_refused(name: str, value: object, text: str) -> None:
    args = parsed("--load somewhere")
    saved = argparse.Namespace(**{**SAVED, name: value})
    (problem,) = refusals.resume_problems(args, saved)
    assert text in problem
    args.finetune = True
    assert refusals.resume_problems(args, saved) == []


@pytest.mark.parametrize(
    "saved", [{}, {"bdlm_objective": "none", "block_size": 32}, SAVED], ids=["old", "ar", "same"]
)
def test_a_resume_or_a_new_stage_is_accepted(saved: dict[str, object]) -> None:
    args = parsed("--load somewhere")
    assert refusals.resume_problems(args, argparse.Namespace(**saved)) == []
