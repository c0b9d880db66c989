"""Runs with adapters: the base stays as it is, adapters are saved alone, resumed and resharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_bp.convert.lora import open_adapters
from megatron_bp.convert.megatron_model import LATEST, find_iteration
from megatron_bp.convert.torch_dist_io import TorchDistReader
from tests.mcore.runs import flags, train_jobs

LOSS = "bdlm loss"
DIGITS = 2e-7  # TensorBoard keeps fp32; the layouts sum in other orders

Logs = dict[str, list[dict[str, float]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def logged(folder: Path) -> Logs:
    """A base of two steps; then four steps with adapters in one go, and with a stop after two."""
    base, saved = folder / "base", folder / "adapters"
    lora = f"--bdlm-lora-rank 4 --bdlm-lora-alpha 8 --pretrained-checkpoint {base}"
    parts = f"{lora} --load {saved} --save {saved} --save-interval 2"
    jobs = [
        ("base", flags(f"--save {base} --save-interval 2 --exit-interval 2")),
        ("stock", flags(f"--load {base} --finetune --exit-interval 1")),
        ("new", flags(f"--load {base} --finetune --bdlm-lora-rank 4 --bdlm-lora-alpha 8")),
        ("first half", flags(f"{parts} --exit-interval 2")),
        ("second half", flags(parts)),
    ]
    return train_jobs(1, jobs, folder)


def test_the_first_loss_is_the_base_model_s_bit_for_bit(logged: Logs) -> None:
    assert logged["new"][0][LOSS] == logged["stock"][0][LOSS]


def test_a_run_goes_on_from_saved_adapters(logged: Logs) -> None:
    assert len(logged["first half"]) == len(logged["second half"]) == 2
    for one, other in zip(logged["new"], logged["first half"] + logged["second half"], strict=True):
        assert one[LOSS] == other[LOSS]
        assert one["grad-norm"] == other["grad-norm"]


def test_a_checkpoint_holds_adapters_and_their_optimizer_state_only(
    logged: Logs, folder: Path
) -> None:
    reader = TorchDistReader(find_iteration(folder / "adapters", LATEST))
    tensors = {name for name in reader.tensors if not name.startswith("rng_state")}
    assert {name.rpartition(".")[2] for name in tensors} == {"lora_a", "lora_b"}
    model = {name for name in tensors if not name.startswith("optimizer.")}
    layers = {name.removeprefix("decoder.layers.") for name in model}
    assert layers == {
        f"{layer}.{linear}.{factor}" if not _stacked(reader) else f"{linear}.{factor}"
        for layer in (0, 1)
        for linear in (
            "self_attention.linear_qkv",
            "self_attention.linear_proj",
            "mlp.linear_fc1",
            "mlp.linear_fc2",
        )
        for factor in ("lora_a", "lora_b")
    }
    states = {name for name in tensors if name.startswith("optimizer.state.exp_avg.")}
    assert {name.removeprefix("optimizer.state.exp_avg.") for name in states} == model


def test_other_layouts_log_the_same_losses(logged: Logs, folder: Path, tmp_path: Path) -> None:
    """Two ranks start from the base, and go on from what one rank saved (and shard it anew)."""
    lora = (
        f"--bdlm-lora-rank 4 --bdlm-lora-alpha 8 --pretrained-checkpoint {folder / 'base'} "
        "--no-load-rng"
    )
    adapters = f"--load {folder / 'adapters'} --ckpt-step 2"
    jobs = [
        ("start", flags(f"{lora} --context-parallel-size 2 --block-parallel-size 2")),
        ("go on", flags(f"{lora} --tensor-model-parallel-size 2 --sequence-parallel {adapters}")),
    ]
    two = train_jobs(2, jobs, tmp_path)
    assert_close(two["start"], logged["new"])
    assert_close(two["go on"], logged["new"][2:])


def assert_close(got: list[dict[str, float]], want: list[dict[str, float]]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one[LOSS] == pytest.approx(other[LOSS], rel=DIGITS)
        assert one["grad-norm"] == pytest.approx(other["grad-norm"], rel=1e-5)


def _stacked(reader: Any) -> bool:
    return "decoder.layers.mlp.linear_fc1.lora_a" in reader.tensors


def test_the_converter_reads_what_a_run_saved(logged: Logs, folder: Path) -> None:
    adapters = open_adapters(folder / "adapters")
    assert (adapters.rank, adapters.alpha, adapters.iteration) == (4, 8, 4)
    assert len(adapters.factors) == 2 * 4
    for module, (a, b) in adapters.factors.items():
        assert a.size(0) == b.size(1) == 4
        assert b.abs().max() > 1e-4, module  # trained
