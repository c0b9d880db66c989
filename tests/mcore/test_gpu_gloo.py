"""Two ranks that share a GPU over gloo train what one rank trains.

What only a GPU can show: that every operation of a step exists in gloo for CUDA tensors.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.distributed import run_distributed
from tests.mcore.runs import DIFFUSION, MODEL, as_job, flags, read_scalars

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LOCAL = (
    "--transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-persist-layer-norm --no-rope-fusion --distributed-backend gloo --eval-iters 0 --bf16 "
    "--bp-attention-kernel sdpa --hidden-size 128 --kv-channels 64 --seq-length 512 "
    "--max-position-embeddings 512"
)
KINDS = {"reduced": "", "sharded": "--use-distributed-optimizer"}


def _jobs(rank: int, num_ranks: int, folder: str) -> None:
    from megatron_bp.mcore import cpu
    from megatron_bp.mcore.adaptor import train

    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron's demand before Blackwell
    cpu.use_shipped_dataset_helpers()
    torch.compiler.set_stance("force_eager")  # small models: compiling takes most of the time
    # Parameters made on the CPU stay there.
    model = [flag for flag in MODEL if flag != "--use-cpu-initialization"]
    split = f"--context-parallel-size {num_ranks} --block-parallel-size {num_ranks}"
    for kind, more in KINDS.items():
        given = flags(f"{LOCAL} {split} {more}", [*model, *DIFFUSION])
        where = ["--tensorboard-dir", f"{folder}/{kind} {num_ranks}"]
        as_job(rank, num_ranks, [*given, *where], train)


def test_two_ranks_on_one_gpu_train_what_one_rank_trains(tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        run_distributed(_jobs, num_ranks, str(tmp_path), timeout=120.0)
    for kind in KINDS:
        one, two = (read_scalars(tmp_path / f"{kind} {num}") for num in (1, 2))
        print("TE_REPORT gloo", kind, [(s["bdlm loss"], s["grad-norm"]) for s in (*one, *two)])
        assert len(two) == 4
        for step, same in zip(one, two, strict=True):
            for name in ("bdlm loss", "grad-norm"):
                assert same[name] == pytest.approx(step[name], rel=1e-2)
        assert abs(one[0]["bdlm loss"] - one[1]["bdlm loss"]) > 0.05
