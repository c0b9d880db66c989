"""Shows that checkpoints of real training runs export as the weights that Megatron itself reads.

The runs are jobs of pretrain_bdlm: experts spread over ranks, with and without sharded clean rows,
tensor and pipeline parallel. The reference is Megatron's own reader (load_plain_tensors) and the
oracles of family_oracles.py; only training writes optimizer, RNG and padding as users have them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, ar_to_bdlm
from megatron_bp.convert.bdlm_settings import BdlmSettings
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.families import read_model
from megatron_bp.convert.hf_assets import read_config
from megatron_bp.convert.mask_wish import MaskWish
from megatron_bp.convert.megatron_args import megatron_flags
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from tests.convert.family_oracles import expected_tensors
from tests.convert.tiny_families import make_case, write_repository
from tests.convert.tiny_models import read_hf
from tests.distributed import run_distributed
from tests.mcore.runs import _train_jobs

Tensors = dict[str, torch.Tensor]
SETTINGS = BdlmSettings("standard", 4, "block_causal", "", 100)
LENGTH, STEPS = 32, 2
RUN = (
    f"--seq-length {LENGTH} --micro-batch-size 1 --global-batch-size 2 --train-iters {STEPS} "
    "--lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --eval-iters 0 --eval-interval 100 "
    "--log-interval 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 102 --seed 7 "
    "--num-workers 0 --use-cpu-initialization --transformer-impl local --save-interval 100 "
    "--distributed-backend gloo"
)
CSBP2 = "--context-parallel-size 2 --block-parallel-size 2"
EP2 = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"
RESHARDABLE = "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
RANKS = 4
# One run with the distributed optimizer, one with the plain one: name: (model, flags)
RUNS = {
    "ep2-csbp2-dp2": ("qwen3_moe-untied", f"{EP2} {CSBP2} {RESHARDABLE}"),
    "tp2-pp2": (
        "qwen3-tied",
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
    ),
}


def _flags(root: Path, name: str) -> list[str]:
    model, parallel = RUNS[name]
    shape = read_model(read_config(root / model / "hf"))[1]
    words = [f"--load {root / model}", f"--save {root / name}", RUN, parallel]
    for flag, value in megatron_flags(shape, SETTINGS, torch.bfloat16).items():
        words.append(f"--{flag}" if value is True else f"--{flag} {value}")
    return " ".join(words).split()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensors]]:
    """Returns a folder of runs, and what Megatron reads in each of their checkpoints."""
    root = tmp_path_factory.mktemp("runs")
    for model, _ in RUNS.values():
        hf = write_repository(root / f"{model}-hf", *make_case(model))
        request = ImportRequest(hf, root / model, Layout.PER_LAYER, "keep", overwrite=False)
        wish = MaskWish("", 100, resize=False, init="mean")
        ar_to_bdlm(request, SETTINGS, wish, Silent())
    jobs = [(name, _flags(root, name)) for name in RUNS]
    return root, run_distributed(_train_and_read, RANKS, jobs, str(root), timeout=400.0)[0]


def _train_and_read(rank: int, world_size: int, jobs: list[Any], root: str) -> dict[str, Tensors]:
    from megatron.core import dist_checkpointing

    _train_jobs(rank, world_size, jobs)
    folders = {name: Path(root) / name / f"iter_{STEPS:07d}" for name in RUNS}
    load = dist_checkpointing.load_plain_tensors
    plain = {name: dict(load(str(folder))) for name, folder in folders.items()}
    return plain if rank == 0 else {}


def _export(root: Path, name: str, target: str, **changes: Any) -> dict[str, Any]:
    assets = root / RUNS[name][0] / "hf"
    sizes = (-1, changes.pop("dtype", "keep"), 10**9, 0, -1, False)
    mcore_to_hf(ExportRequest(root / name, root / target, assets, *sizes, **changes), Silent())
    model = RUNS[name][0]
    config = {"tie_word_embeddings": False, **read_config(root / target)}
    return expected_tensors(model, config, read_hf(root / target))


def _stored(plain: Tensors, key: str, prefix: str) -> torch.Tensor:
    """Returns a tensor of a training checkpoint, whatever its layout, by its per-layer key."""
    chained = rf"(?:chained_\d+\.)?{re.escape(prefix)}" if prefix else ""
    parts = key.split(".")
    for name in plain:
        if re.fullmatch(chained + re.escape(key), name):
            return plain[name]
        stacked = ".".join([*parts[:2], *parts[3:]])
        if parts[0] == "decoder" and re.fullmatch(chained + re.escape(stacked), name):
            return plain[name][int(parts[2])]
    raise AssertionError(f"{prefix}{key} is not among {sorted(plain)[:9]}")


def _differing(expected: Tensors, plain: Any, prefix: str = "") -> list[str]:
    wrong = []
    for key, tensor in expected.items():
        if key.endswith("pre_mlp_layernorm.weight"):
            continue  # the local specification stores it under its other name
        stored = _stored(plain, key, prefix)[: tensor.shape[0]]
        if stored.dtype != tensor.dtype or not torch.equal(stored, tensor):
            wrong.append(key)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_export_has_the_weights_that_megatron_reads(trained: Any, name: str):
    root, plain = trained[0], trained[1][name]
    weights = _export(root, name, f"{name}-model")
    assert _differing(weights, plain) == []
    start = expected_tensors(
        RUNS[name][0],
        {"tie_word_embeddings": False, **read_config(root / RUNS[name][0] / "hf")},
        read_hf(root / f"{RUNS[name][0]}-hf"),
    )
    moved = [key for key in weights if not torch.equal(weights[key], start[key])]
    assert len(moved) > len(weights) / 2  # it was trained
    # A float32 export prefers the optimizer's copies, where bf16 has lost their last bits.
    masters = _export(root, name, f"{name}-master", dtype="float32")
    assert _differing(masters, plain, _master_prefix(plain)) == []
    assert all(torch.equal(masters[key].bfloat16(), weights[key]) for key in weights)
    assert any(not torch.equal(masters[key], weights[key].float()) for key in weights)


def _master_prefix(plain: Tensors) -> str:
    kind = "fp32_param" if any(".fp32_param." in key for key in plain) else "param"
    return f"optimizer.state.{kind}."
