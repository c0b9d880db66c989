"""The small-problem kernel equals the dense kernel, merged into what was there before.

Without a GPU it runs in Triton's interpreter, in a process of its own because the interpreter is
chosen when Triton is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_bp.attention.contract import Saved, Window, window_mask
from megatron_bp.attention.kernels.dense import attend, attend_backward
from megatron_bp.attention.merge import merge

# problems, rows, samples, key/value heads, group, head size, keys of the two runs, window
CASES = [
    (3, 5, 2, 2, 3, 16, (5, 5), Window(4, -1)),  # a block with the block before it
    (2, 4, 1, 1, 2, 24, (4, 0), Window()),  # an own block alone
    (2, 7, 1, 2, 1, 16, (7, 0), Window(-1, 0)),  # the far end of a window
    (1, 3, 2, 1, 4, 8, (2, 3), Window(4, 0)),  # a ragged causal block
]


def check(case: tuple, store: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Output, LSE and gradients of one case, with rows beside the problems left alone."""
    from megatron_bp.attention import triton_small as small

    problems, rows, samples, kv_heads, group, size, lengths, window = case
    heads, generator = kv_heads * group, torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def query() -> Tensor:  # rows with a gap after each problem
        return draw(problems * (rows + 1), samples, heads, size)

    def view(x: Tensor) -> Tensor:
        return x.unflatten(0, (problems, rows + 1))[:, :rows]

    q, out, dout, dq = query(), query(), query(), query()
    lse = draw(samples, heads, problems * (rows + 1)).float().permute(2, 0, 1)
    lse[::3] = float("-inf")
    out[::3] = 0
    packed = [draw(problems, n, samples, 2, kv_heads, size) for n in lengths]
    parts = small.KeyParts(*((p[:, :, :, 0], p[:, :, :, 1]) for p in packed))
    k, v = (torch.cat([a, b], 1) for a, b in zip(parts.first, parts.second, strict=True))
    mask, scale = window_mask(rows, k.shape[1], window, q.device), size**-0.5

    def flat(x: Tensor) -> Tensor:  # [X, Q, Z, ...] as the dense kernel takes it
        return x.transpose(1, 2).flatten(0, 1)

    part, part_lse = attend(flat(view(q)).float(), flat(k).float(), flat(v).float(), mask, scale)
    want, want_lse = part, part_lse.transpose(1, 2)
    if store:
        view(out)[:], view(lse)[:], view(dq)[:] = float("nan"), float("nan"), float("nan")
    else:
        want, want_lse = merge(flat(view(out)).float(), flat(view(lse)), want, want_lse)
    before = out.clone()
    small.forward_into(view(q), parts, window, scale, (view(out), view(lse)), store=store)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(flat(view(out)).float(), want, **close)
    torch.testing.assert_close(flat(view(lse)), want_lse, rtol=1e-5, atol=1e-5)
    gap = torch.arange(len(out)) % (rows + 1) == rows
    assert torch.equal(out[gap], before[gap])
    saved = Saved(
        flat(view(q)).float(),
        flat(k).float(),
        flat(v).float(),
        flat(view(out)).float(),
        flat(view(lse)).transpose(1, 2),
    )
    grads = attend_backward(flat(view(dout)).float(), saved, mask, scale)
    want_dq = grads[0] if store else grads[0] + flat(view(dq)).float()
    dk, dv = small.backward_into(
        small.Rows(view(q), view(out), view(lse), view(dout)),
        parts,
        window,
        scale,
        view(dq),
        store=store,
    )
    torch.testing.assert_close(flat(view(dq)).float(), want_dq, **close)
    torch.testing.assert_close(flat(dk).float(), grads[1], **close)
    torch.testing.assert_close(flat(dv).float(), grads[2], **close)


def check_all(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Every case on `device`."""
    for case in CASES:
        for store in (False, True):
            check(case, store, device, dtype, tolerance)


def test_small_problems_equal_the_dense_kernel_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, __file__], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    check_all("cpu", torch.float32, 1e-5)
