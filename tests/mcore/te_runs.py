"""Training jobs of a tiny Transformer Engine model, stock and with our attention in it.

Used with the stand-in on the CPU (test_te_attention.py) and with Transformer Engine on a GPU
(test_gpu_te.py): whole jobs from their command lines, in a process of their own.
"""

from __future__ import annotations

import os
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.distributed import run_distributed
from tests.mcore.runs import DIFFUSION, MODEL, as_job, flags, read_scalars
from tests.mcore.scripts import pretrain_script, run_script

SCRIPT = pretrain_script()
SPEC = ["--spec", "megatron_bp.mcore.spec", "gpt_layer"]
# The shape that real kernels want; every key must be in the model and in the checkpoint.
TE = flags(
    "--transformer-impl transformer_engine --hidden-size 128 --ffn-hidden-size 192 "
    "--kv-channels 64 --seq-length 128 --dist-ckpt-strictness raise_all --rerun-mode disabled "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion",
    MODEL,
)
ON_CPU = ["--no-persist-layer-norm", "--no-rope-fusion", "--distributed-backend", "gloo"]
ON_GPU = ["--bp-attention-kernel", "te"]  # others would compile theirs first
FIVE = ["--train-iters", "5"]

Logged = dict[str, list[dict[str, float]]]


def train_te_jobs(folder: Path, stand_in: bool) -> Logged:
    """Returns what each job logged, by name.

    stock, ours: five next-token steps. diffusion: two steps, saved; X from Y: what X, loading the
    checkpoint of Y, trains after it.
    """
    run_distributed(_jobs, 1, str(folder), stand_in, timeout=300.0)
    return {path.name: read_scalars(path) for path in (folder / "logs").iterdir()}


def train_context_jobs(folder: Path, stand_in: bool) -> Logged:
    """Returns what block-diffusion training logs on one rank, and on two that share samples."""

    def job(num_ranks: int) -> None:
        run_distributed(_context_job, num_ranks, str(folder), stand_in, timeout=200.0)

    with ThreadPoolExecutor() as pool:  # most of the time goes into starting
        list(pool.map(job, (1, 2)))
    return {name: read_scalars(folder / name) for name in ("one", "csbp")}


def bits(steps: list[dict[str, float]]) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(step.get("bdlm loss", step.get("lm loss", 0.0)), step["grad-norm"]) for step in steps]


def prepare(rank: int, num_ranks: int, folder: str, stand_in: bool) -> list[str]:
    """Makes this process able to run the jobs; returns their common flags."""
    if stand_in:
        from tests.mcore import te_stand_in

        te_stand_in.install()
        from megatron_bp.mcore import cpu

        cpu.enable_cpu()
    else:
        os.environ.update(
            CUDA_DEVICE_MAX_CONNECTIONS="1",  # Megatron's demand before Blackwell
            NVTE_ALLOW_NONDETERMINISTIC_ALGO="0",
            CUBLAS_WORKSPACE_CONFIG=":4096:8",
        )
        torch.cuda.set_device(rank)
        dist.destroy_process_group()  # gloo cannot coalesce the gradients of CUDA parameters
        store = dist.FileStore(f"{folder}/nccl{num_ranks}", num_ranks)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks)
        torch.compiler.set_stance("force_eager")  # small models: compiling takes most of the time
        from megatron_bp.mcore import cpu
    cpu.use_shipped_dataset_helpers()
    if stand_in:
        return [*TE, *ON_CPU]
    # Parameters made on the CPU stay there.
    return [*(flag for flag in TE if flag != "--use-cpu-initialization"), "--bf16"]


def _context_job(rank: int, num_ranks: int, folder: str, stand_in: bool) -> None:
    given = [*prepare(rank, num_ranks, folder, stand_in), *DIFFUSION]
    given += [] if stand_in else ON_GPU
    name = "one"
    if num_ranks > 1:
        name = "csbp"
        given += ["--context-parallel-size", "2", "--block-parallel-size", "2"]
    from megatron_bp.mcore.adaptor import train

    as_job(rank, num_ranks, [*given, "--tensorboard-dir", f"{folder}/{name}"], train)


def _jobs(rank: int, num_ranks: int, folder: str, stand_in: bool) -> None:
    here = prepare(rank, num_ranks, folder, stand_in)
    from megatron_bp import launch

    def run(name: str, given: list[str], how: Any) -> None:
        given = [*here, *given, "--tensorboard-dir", f"{folder}/logs/{name}"]
        try:
            as_job(rank, num_ranks, given, how)
        except Exception:  # the other jobs are worth their time on a GPU
            print(f"the job {name!r} failed:", flush=True)
            traceback.print_exc()

    def next_token(name: str, given: list[str], how: Any) -> None:
        run(name, given if stand_in else [*given, "--deterministic-mode"], how)

    def diffusion(name: str, given: list[str]) -> None:
        torch.use_deterministic_algorithms(False)
        run(name, [*DIFFUSION, *([] if stand_in else ON_GPU), *given], launched)

    def stock() -> None:
        run_script(SCRIPT)

    def launched() -> None:
        launch.main([SCRIPT, *sys.argv[1:]])

    def saved(name: str) -> list[str]:
        path = f"{folder}/{name}"
        return ["--save", path, "--save-interval", "2", "--exit-interval", "2"]

    def loaded(name: str) -> list[str]:
        return ["--load", f"{folder}/{name}", "--train-iters", "4"]

    next_token("stock", FIVE, stock)
    next_token("saved by stock", saved("stock.ckpt"), stock)
    # From here on Megatron's entry points are wrapped; without an objective they pass calls on.
    next_token("ours", [*FIVE, *SPEC], launched)
    next_token("saved by ours", [*SPEC, *saved("ours.ckpt")], launched)
    diffusion("saved by diffusion", saved("diffusion.ckpt"))
    for name in ("stock", "ours", "diffusion"):
        next_token(f"stock from {name}", loaded(f"{name}.ckpt"), launched)
        next_token(f"ours from {name}", [*SPEC, *loaded(f"{name}.ckpt")], launched)
        if name != "diffusion":
            diffusion(f"diffusion from {name}", loaded(f"{name}.ckpt"))
