"""On a GPU, `--bp-recompute-attention auto` keeps attention if the memory for it is left.

What only a GPU can show: the memory that a device has and has not. The decision from given numbers
is tested in test_recompute.py.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

from megatron_bp.mcore.recompute import USABLE_SHARE
from tests.distributed import run_distributed
from tests.mcore.runs import DIFFUSION, as_job, flags, read_scalars
from tests.mcore.te_runs import ON_GPU, prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
LEFT = re.compile(r"([\d.]+) MiB needed to keep, (-?[\d.]+) (GiB|MiB) of device memory left")


def _jobs(rank: int, num_ranks: int, folder: str) -> dict[str, str]:
    """What each job says before its first step."""
    given = [*prepare(rank, num_ranks, folder, False), *DIFFUSION, *ON_GPU, "--seq-length", "1024"]
    given = flags(f"{FULL} --eval-iters 0 --max-position-embeddings 1024", given)
    from megatron_bp.mcore.adaptor import train

    texts = {}
    total = torch.cuda.get_device_properties(0).total_memory
    for name, share in (("roomy", 0.0), ("tight", USABLE_SHARE)):
        ballast = torch.empty(int(share * total), dtype=torch.uint8, device="cuda")
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            as_job(rank, num_ranks, [*given, "--tensorboard-dir", f"{folder}/{name}"], train)
        del ballast
        torch.cuda.empty_cache()
        texts[name] = said.getvalue()
    return texts


def test_attention_is_kept_if_the_memory_is_left(tmp_path: Path) -> None:
    total, free = torch.cuda.mem_get_info()[::-1]
    if free < (USABLE_SHARE + 0.03) * total:
        pytest.skip("needs a CUDA device that others leave alone")
    (texts,) = run_distributed(_jobs, 1, str(tmp_path), timeout=150.0)
    for name, text in texts.items():
        print("TE_REPORT", name, [x for x in text.splitlines() if "keep" in x or "runs twice" in x])
    roomy, tight = (LEFT.search(texts[name]) for name in ("roomy", "tight"))
    assert roomy is not None
    assert tight is not None
    assert roomy[1] == tight[1]
    assert float(roomy[2]) > 50 > 0 > float(tight[2])
    assert "attention under recompute: kept by 2 layers in flight" in texts["roomy"]
    assert "attention under recompute: runs twice" in texts["tight"]
    one, other = (read_scalars(tmp_path / name) for name in ("roomy", "tight"))
    for step, same in zip(one, other, strict=True):
        assert same["bdlm loss"] == pytest.approx(step["bdlm loss"], rel=5e-3)
