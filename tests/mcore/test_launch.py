"""A script started by the launcher is stock Megatron until an objective is asked for, and then
trains bit for bit what the example trains."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_bp.mcore import versions
from tests.distributed import run_distributed
from tests.mcore.runs import DIFFUSION, MODEL, as_job, flags, read_scalars
from tests.mcore.scripts import pretrain_script, run_script

SCRIPT = pretrain_script()
# Defaults that the launcher sets on a CPU, and stock Megatron does not know.
ON_CPU = flags(
    "--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-rope-fusion --distributed-backend gloo",
    MODEL,
)
CSBP = [*DIFFUSION, "--context-parallel-size", "2", "--block-parallel-size", "2"]
SPEC = ["--spec", "megatron_bp.mcore.spec", "gpt_layer"]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, float]]]:
    folder = tmp_path_factory.mktemp("launched") / "logs"
    folder.mkdir()
    run_distributed(_jobs, 2, str(folder), timeout=300.0)
    return {path.name: read_scalars(path) for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["launched", "launched with our spec"])
def test_ten_next_token_steps_are_stock_bit_for_bit(logged: dict, name: str) -> None:
    assert len(logged["stock"]) == 10
    assert bits(logged[name], "lm loss") == bits(logged["stock"], "lm loss")
    assert logged["stock"][-1]["lm loss"] < logged["stock"][0]["lm loss"]


def test_diffusion_steps_are_those_of_the_example_bit_for_bit(logged: dict) -> None:
    assert len(logged["example"]) == 4
    assert bits(logged["csbp"], "bdlm loss") == bits(logged["example"], "bdlm loss")


def test_a_restart_after_a_kill_trains_on_as_if_there_was_none(logged: dict) -> None:
    """The tracker of --load is empty, as a kill can leave it."""
    parts = bits(logged["saved"], "bdlm loss") + bits(logged["restarted"], "bdlm loss")
    assert parts == bits(logged["csbp"], "bdlm loss")


def bits(steps: list[dict[str, float]], loss: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(step[loss], step["grad-norm"]) for step in steps]


def test_entry_points_that_are_not_the_known_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.training import arguments, training

    assert versions.missing_launch_seams() == []

    def pretrain(dataset_provider: Any, model_provider: Any, model_type: Any) -> None:
        """As it was up to 0.17."""

    monkeypatch.setattr(training, "pretrain", pretrain)
    monkeypatch.delattr(arguments, "validate_args")
    with pytest.raises(RuntimeError, match=r"entry points of megatron-core \S+ are not") as error:
        versions.require_launch_seams()
    text = str(error.value)
    assert "pretrain(dataset_provider, model_provider, model_type) does not begin with" in text
    assert "megatron.training.arguments has no validate_args" in text
    assert "examples/pretrain_bdlm.py" in text


def test_a_model_that_has_not_the_known_seams_is_refused() -> None:
    from megatron_bp.mcore.launch import _refuse_other_models

    with pytest.raises(TypeError, match=r"builds its model from object; .* GPTModelConfig"):
        _refuse_other_models(object(), None)
    with pytest.raises(TypeError, match="builds its model from model_provider=<function"):
        _refuse_other_models(None, bits)


CONTAINER = SimpleNamespace(model=None)


@pytest.mark.parametrize(
    ("given", "named", "said"),
    [
        # Up to 0.17: the arguments are parsed in pretrain.
        (
            (bits, bits, "gpt", bits),
            {"args_defaults": {}},
            "argument 'args_defaults'",
        ),
        ((bits, bits, "gpt", bits), {}, "cfg_container is <function bits"),
        # 0.18: what builds the model comes before the model's type.
        (
            (SimpleNamespace(model=None), bits, bits, "gpt", bits),
            {},
            "model_type is <function bits",
        ),
    ],
)
def test_a_script_of_another_version_is_refused(given: tuple, named: dict, said: str) -> None:
    from megatron.training.training import pretrain

    from megatron_bp.mcore.launch import _bind

    with pytest.raises(TypeError, match=re.escape(said)) as error:
        _bind(pretrain, given, named)
    assert "Use the pretrain_gpt.py of that version" in str(error.value)


def _install_too_late() -> None:
    from megatron.training import pretrain

    from megatron_bp.mcore.launch import install

    main: Any = sys.modules["__main__"]
    main.pretrain = pretrain
    with pytest.raises(RuntimeError, match="after the script had imported pretrain"):
        install()
    del main.pretrain


def _jobs(rank: int, num_ranks: int, folder: str) -> None:
    from megatron_bp import launch
    from megatron_bp.mcore import adaptor, cpu

    cpu.enable_cpu()  # stock Megatron has no other way to run here
    cpu.use_shipped_dataset_helpers()

    def run(name: str, given: list[str], how: Any) -> None:
        as_job(rank, num_ranks, [*given, "--tensorboard-dir", f"{folder}/{name}"], how)

    def stock() -> None:
        run_script(SCRIPT)

    def launched() -> None:
        launch.main([SCRIPT, *sys.argv[1:]])

    ten = [*ON_CPU, "--train-iters", "10"]
    run("stock", ten, stock)
    run("example", [*MODEL, *CSBP], adaptor.train)
    _install_too_late()
    run("launched", ten, launched)
    run("launched with our spec", [*ten, *SPEC], launched)
    run("csbp", [*MODEL, *CSBP, *SPEC], launched)
    _restart(rank, folder, lambda name, given: run(name, given, launched))
    with pytest.raises(ImportError, match=r"--spec megatron_bp\.mcore.nowhere gpt does not import"):
        run("broken spec", [*MODEL, "--spec", "megatron_bp.mcore.nowhere", "gpt"], launched)


def _restart(rank: int, folder: str, run: Any) -> None:
    """Two steps, saved; then two more. The writers of checkpoints are guarded in both."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    from megatron_bp.mcore import adaptor

    get_write_results_queue("fork")  # a new process would import torch
    stock, guarded = adaptor.guard_writers, []

    def guard(args: Any) -> None:
        guarded.append(args.save)
        stock(args)

    adaptor.guard_writers = guard
    given = flags(f"--save {folder}/../run --save-interval 2", [*MODEL, *CSBP])
    run("saved", [*given, "--exit-interval", "2"])
    if rank == 0:
        Path(folder, "../run/latest_checkpointed_iteration.txt").write_text("")
    dist.barrier()
    run("restarted", [*given, "--load", f"{folder}/../run"])
    adaptor.guard_writers = stock
    assert guarded == [f"{folder}/../run"] * 2
