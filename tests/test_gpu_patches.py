"""Patched, Transformer Engine's own attention gives block-parallel attention, bit for bit.

What only a GPU can show: that the seam works in the real package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.test_patches import ROOT, TE, patch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="no Transformer Engine"),
]


def test_a_patched_attention_asks_its_context(tmp_path: Path) -> None:
    spec = find_spec("transformer_engine")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    shutil.copytree(package, tmp_path / package.name, copy_function=os.symlink)
    for library in package.parent.glob("transformer_engine*.so"):  # looked for beside the package
        (tmp_path / library.name).symlink_to(library)
    (tmp_path / TE).unlink()
    shutil.copy(package.parent / TE, tmp_path / TE)
    done = patch("apply", tmp_path)
    assert done.returncode == 0, done.stderr
    path = f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    code = "from tests.test_gpu_patches import compare; compare()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"from {tmp_path}" in done.stdout


def compare() -> None:
    """Compares outputs and gradients with a direct call, in this process."""
    import transformer_engine.pytorch as te

    from megatron_bp.attention.block_parallel import AttentionOptions, block_parallel_attention
    from megatron_bp.attention.te_context import TeContext
    from megatron_bp.comm.groups import BlockGroups
    from megatron_bp.layout.plan import PlanRequest, make_plan

    plan = make_plan(PlanRequest(length=1024, block_size=32), 0)
    options = AttentionOptions(softmax_scale=128**-0.5, kernel="te", deterministic=True)
    torch.manual_seed(3)
    q, k, v = (
        torch.randn(plan.rows.num_rows, 1, heads, 128, device="cuda", dtype=torch.bfloat16)
        for heads in (8, 2, 2)
    )
    layer = te.DotProductAttention(8, 128, num_gqa_groups=2, attention_dropout=0.0)
    context = TeContext(plan, BlockGroups.single(), options)
    layer.set_context_parallel_group(context, None, None, "block_parallel")
    results = []
    for run in (
        lambda *x: layer(*x, qkv_format="sbhd"),
        lambda *x: block_parallel_attention(*x, plan, BlockGroups.single(), options).flatten(2),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = run(*leaves)
        out.sin().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    print("from", te.__file__)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
