"""A dry run tells groups, memory and bytes of the flags, and refuses with flags that work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_bp.mcore.dry_run import PARTS, Report
from megatron_bp.mcore.dry_run_shape import Cluster
from tests.mcore.forks import Megatron
from tests.mcore.runs import flags

ROOT = Path(__file__).parents[2]
SIXTEEN = Cluster(num_gpus=16, gpus_per_node=8, memory_gib=80.0, reserve_gib=6.0)
# A model of 3.4 B weights on samples of 65,536 tokens: what a layout costs shows.
BASE = (
    "--num-layers 24 --hidden-size 3072 --ffn-hidden-size 9216 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --kv-channels 128 --swiglu --bf16 "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--max-position-embeddings 65536 --padded-vocab-size 131072 --attention-dropout 0 "
    "--hidden-dropout 0 --seq-length 65536 --micro-batch-size 1 --global-batch-size 16 "
    "--train-iters 10 --lr 1e-5 --bdlm-objective standard --mask-token-id 100 "
    "--use-distributed-optimizer --tokenizer-type HuggingFaceTokenizer --tokenizer-model nowhere"
)
CSBP = "--context-parallel-size 4 --block-parallel-size 4"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def _report(given: str, cluster: Cluster) -> tuple[Report | str, bool]:
    """The report, or the text of the refusal; and whether a process group was started."""
    import torch.distributed as dist

    from megatron_bp.mcore.dry_run import dry_run

    found: Any
    try:
        found = dry_run(given.split(), cluster)
    except ValueError as error:
        found = str(error)
    return found, dist.is_initialized()


@pytest.fixture
def report(megatron: Megatron) -> Any:
    """Reports of flags added to BASE, from a process that may enable the CPU."""

    def of(text: str, cluster: Cluster = SIXTEEN, base: str = BASE) -> Any:
        found, started = megatron.call(_report, f"{base} {text}", cluster)
        assert not started
        return found

    return of


def numbers(report: Report) -> dict[str, float]:
    """The lines of the form "number name"."""
    lines = re.findall(r"^ +([0-9.]+)  (.+)$", report.text, re.MULTILINE)
    return {name: float(number) for number, name in lines}


def test_the_parts_add_up_to_what_a_gpu_needs(report: Any) -> None:
    found = numbers(report(f"{CSBP} {FULL}"))
    parts = [found[name] for _, name in PARTS]
    reserve = found["reserve for CUDA, NCCL and fragments"]
    assert reserve == 6.0
    assert sum(parts) + reserve == pytest.approx(found["of 80"], abs=0.05)
    assert found["gradients"] == pytest.approx(2 * found["weights"], abs=0.02)  # fp32 for bf16


@pytest.mark.parametrize("memory", [20.0, 32.0, 40.0])
def test_flags_named_by_a_refusal_fit(report: Any, memory: float) -> None:
    small = Cluster(16, 8, memory, 6.0)
    refused = report(CSBP, small)
    (problem,) = refused.problems
    assert f"and has {memory:g}; it would fit with" in problem
    offered = report(problem.partition("it would fit with ")[2], small)
    assert offered.problems == ()
    assert numbers(offered)[f"of {memory:g}"] <= memory


def test_a_refusal_names_more_gpus_if_these_are_too_few(report: Any) -> None:
    (problem,) = report("", Cluster(1, 8, 24.0, 6.0)).problems
    assert re.search(r"it would fit on (2|4|8) GPUs with --tensor-model-parallel-size", problem)
    (problem,) = report("", Cluster(1, 8, 2.0, 1.0)).problems
    assert problem.endswith(
        "no split of up to 8 times as many GPUs fits; use a shorter --seq-length"
    )


def test_attention_is_kept_if_memory_allows_as_a_run_does(report: Any) -> None:
    kept, again = report(f"{CSBP} {FULL}"), report(f"{CSBP} {FULL} --bp-recompute-attention rerun")
    assert "recompute: full keep attention" in kept.text
    assert "recompute: full)" in again.text
    needed = numbers(again)["of 80"]
    assert numbers(kept)["of 80"] > needed
    tight = report(f"{CSBP} {FULL}", Cluster(16, 8, needed + 0.1, 6.0))
    assert "recompute: full)" in tight.text
    assert tight.problems == ()


def test_groups_are_megatrons(report: Any) -> None:
    text = report(f"{CSBP} --tensor-model-parallel-size 2 --sequence-parallel").text
    assert "world 16 = TP 2 x PP 1 x context group 4 x DP 2" in text
    assert "tensor: 8 of 2 ranks, within a node: [0,1] [2,3]" in text
    assert "context (one sample): 4 of 4 ranks, within a node: [0,2,4,6] [1,3,5,7]" in text
    assert "data: 8 of 2 ranks, over 2 nodes: [0,8] [1,9]" in text
    assert "pipeline: 1 rank each" in text
    hybrid = report("--context-parallel-size 2 --block-parallel-size 16").text
    assert "context (one sample): 1 of 16 ranks, over 2 nodes" in hybrid
    assert "clean shards: 8 of 2 ranks, within a node: [0,1] [2,3]" in hybrid


def test_bytes_are_those_of_the_exchange(report: Any) -> None:
    """24 layers, 4 micro-batches; a rank sends L / 4 rows of 2 * 8 * 128 numbers to 3 others."""
    found = numbers(report(CSBP))
    sent = 24 * 4 * 3 * (65536 / 4) * (2 * 8 * 128) / 2**30
    gather = next(size for name, size in found.items() if name.startswith("clean K/V gather"))
    reduce = next(size for name, size in found.items() if name.startswith("clean K/V reduce"))
    assert gather == pytest.approx(2 * sent, abs=1e-3)  # bf16
    assert reduce == pytest.approx(4 * sent, abs=1e-3)  # fp32 on the wire by default


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("one/ours", FULL),
        ("one/recompute-all", f"{FULL} --bp-recompute-attention rerun"),
        ("one/ours-unpruned", f"{FULL} --no-bp-prune-last-layer"),
    ],
)
def test_the_memory_is_what_an_h200_had_allocated(report: Any, case: str, text: str) -> None:
    """Whole steps of Megatron: docs/bench/step_h200.json, peaks of the allocator."""
    measured = json.loads((ROOT / "docs/bench/step_h200.json").read_text())["runs"][0]["results"]
    peak = next(result["peak_gib"] for result in measured if result["case"] == case)
    h200 = Cluster(1, 8, 141.0, 6.0)
    eight_layers = BASE.replace("--num-layers 24", "--num-layers 8")
    found = numbers(report(f"{text} --global-batch-size 1", h200, eight_layers))
    assert found["of 141"] - 6.0 == pytest.approx(peak, rel=0.04)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--attention-dropout 0.1", "use --attention-dropout 0"),
        ("--context-parallel-size 3 --block-parallel-size 3", "16 processes are not a multiple"),
        ("--async-save", "add --use-persistent-ckpt-worker"),
        ("--mask-token-id 131072", "outside the vocabulary [0, 131072)"),
        ("--use-checkpoint-args --load x --save x", "give the model's flags"),
        ("--global-batch-size 24 --pipeline-model-parallel-size 5", "16 processes are not a"),
    ],
)
def test_what_a_run_refuses_is_refused(report: Any, text: str, said: str) -> None:
    assert said in report(text)


def test_a_vocabulary_in_the_tokenizer_only_is_asked_for(report: Any) -> None:
    bare = BASE.replace("--padded-vocab-size 131072", "")
    assert "give --padded-vocab-size" in report(CSBP, base=bare)
    given = report(f"{CSBP} {FULL} --vocab-size 131000", base=bare)
    assert given.problems == ()


def test_a_model_that_is_not_converted_yet_is_a_note(report: Any) -> None:
    text = report(
        f"{CSBP} --pretrained-checkpoint nowhere --load run --save run --save-interval 5"
    ).text
    assert "note: --pretrained-checkpoint nowhere holds no checkpoint" in text


def test_next_token_training_has_no_dry_run(report: Any) -> None:
    assert "needs a block-diffusion objective" in report("--bdlm-objective none")


def test_small_runs_of_the_tests_are_described_too(report: Any) -> None:
    """Unlike BASE: fp32, no Transformer Engine, norms of heads, no grouped batches."""
    small = " ".join(flags("--vocab-size 127"))
    found = report("--transformer-impl local", Cluster(1, 8, 1.0, 0.5), base=small)
    assert found.problems == ()
    assert "world 1 = TP 1 x PP 1 x context group 1 x DP 1" in found.text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((0, 8, 80.0, 6.0), "num_gpus=0"),
        ((16, 8, 5.0, 6.0), "reserve_gib=6.0 must be at least 0 and below memory_gib=5.0"),
    ],
)
def test_a_cluster_has_gpus_with_memory(given: tuple[Any, ...], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Cluster(*given)
