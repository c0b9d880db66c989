"""On a GPU, checkpoints written in the background hold the weights of their step.

What only a GPU can show: the writer is another process and gets the tensors from device memory
(CUDA IPC), while training goes on to change them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.mcore.checkpoints import iteration_folder
from tests.distributed import run_distributed
from tests.mcore.forks import checkpoint
from tests.mcore.runs import DIFFUSION, as_job, flags, read_scalars
from tests.mcore.te_runs import ON_GPU, prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ASYNC = (
    "--async-save --use-persistent-ckpt-worker --async-strategy mcore --save-interval 1 "
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
)
LOSS = "bdlm loss"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_background_save_holds_the_weights_of_its_step(num_ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} CUDA devices")
    run_distributed(save_runs, num_ranks, str(tmp_path), False, timeout=170.0)
    check(tmp_path)


def check(folder: Path) -> None:
    """Asserts it of what `save_runs` left."""
    seen = []
    for step in (1, 2, 3, 4):
        saved = checkpoint(iteration_folder(folder / "run", step))
        wanted = torch.load(folder / f"weights_{step}.pt")
        for name, weight in wanted.items():
            assert torch.equal(entry(saved, name), weight), (step, name)
            main = entry(saved, name, "optimizer.state.param.")
            assert main.dtype == torch.float32
            assert torch.equal(main.to(weight.dtype), weight), (step, name)
        seen.append(wanted)
    assert len(seen[0]) > 10
    for one, other in pairwise(seen):
        assert any(not torch.equal(one[name], other[name]) for name in one)
    whole, *parts = (read_scalars(folder / name) for name in ("whole", "first", "second"))
    print("TE_REPORT saving", [step[LOSS] for step in whole], [s[LOSS] for p in parts for s in p])
    for step, other in zip(whole, parts[0] + parts[1], strict=True):
        assert other[LOSS] == pytest.approx(step[LOSS], rel=1e-2)


def entry(saved: dict[str, torch.Tensor], name: str, prefix: str = "") -> torch.Tensor:
    """A parameter in a checkpoint, where equal layers are stacked."""
    if prefix + name in saved:
        return saved[prefix + name]
    number = name.split("layers.")[1].split(".")[0]
    return saved[prefix + name.replace(f"layers.{number}.", "layers.", 1)][int(number)]


def save_runs(rank: int, num_ranks: int, folder: str, stand_in: bool) -> None:
    """Four steps without a checkpoint, and two and two more with one after each."""
    given = [*prepare(rank, num_ranks, folder, stand_in), *DIFFUSION, "--eval-iters", "0"]
    given += ["--bf16"] if stand_in else ON_GPU
    if num_ranks > 1:
        given += flags("--context-parallel-size 2 --block-parallel-size 2", ())
    from megatron.training import training

    from megatron_bp.mcore.adaptor import train

    def run(name: str, more: str) -> None:
        where = flags(f"{more} --tensorboard-dir {folder}/{name}", given)
        as_job(rank, num_ranks, where, train)

    run("whole", "--use-distributed-optimizer")
    if rank == 0:
        training.save_checkpoint = noting(training.save_checkpoint, folder)
    run("first", f"{ASYNC} --save {folder}/run --exit-interval 2")
    run("second", f"{ASYNC} --save {folder}/run --load {folder}/run")


def noting(save: Callable[..., Any], folder: str) -> Callable[..., Any]:
    """Megatron's `save`, that first writes down the weights by itself."""

    def noted(iteration: int, model: list[Any], *given: Any, **named: Any) -> Any:
        weights = {
            name.removeprefix("module."): weight.detach().cpu().clone()
            for name, weight in model[0].module.named_parameters()
        }
        torch.save(weights, Path(folder, f"weights_{iteration}.pt"))
        return save(iteration, model, *given, **named)

    return noted
