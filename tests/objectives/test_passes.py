"""Specifies megatron_bp.objectives.passes, in torch and in Triton's interpreter."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_bp.objectives import passes
from megatron_bp.objectives.passes import BLOCK, Live
from tests.interpreted import run_interpreted

NAN = float("nan")

# columns, live columns, column of each of four labels (-1: on another rank)
CASES = [
    (7, Live(7, -1), (0, 6, -1, 3)),
    (7, Live(5, 2), (0, 4, -1, 3)),
    (BLOCK + 904, Live(BLOCK + 904, 0), (1, BLOCK + 903, -1, BLOCK - 1)),  # two blocks
    (BLOCK + 904, Live(BLOCK + 1, BLOCK), (0, BLOCK - 1, -1, 9)),  # the second is dead
    (9, Live(0, -1), (-1, -1, -1, -1)),  # a shard of padding
]
SCALE = torch.tensor([1.0, 0.25, 3.0, 0.0])


def live_logits(columns: int, live: Live) -> Tensor:
    """fp32 logits, -inf where they do not count."""
    logits = 30 * torch.randn(4, columns, generator=torch.Generator().manual_seed(0))
    logits[:, live.stop :] = float("-inf")
    if live.excluded >= 0:
        logits[:, live.excluded] = float("-inf")
    return logits


def run_passes(
    logits: Tensor, live: Live, column: Tensor, lse: Tensor, out: Tensor, known: bool
) -> tuple[Tensor, Tensor]:
    """Runs the passes in two pieces; returns lse of each block, and label logits."""
    device, columns = out.device, logits.shape[1]
    lse_blocks = torch.full((4, -(-columns // BLOCK)), NAN, device=device)
    picked = torch.zeros(4, device=device)
    column, lse, scale = column.to(device), lse.to(device), SCALE.to(device)
    for start in range(0, columns, BLOCK):
        stop = min(start + BLOCK, columns)
        # rows of a wider buffer, poison where no logit counts
        piece = torch.full((4, BLOCK + 3), NAN, device=device)[:, : stop - start]
        piece.copy_(logits[:, start:stop].masked_fill(logits[:, start:stop].isinf(), NAN))
        place = out[:, start:stop]
        if known:
            passes.write_gradient(place, piece, lse, column, scale, live, start)
            continue
        if out.dtype == torch.float32:
            place.copy_(piece)
            piece = place
        block = lse_blocks[:, start // BLOCK, None]
        passes.write_statistics(block, picked, place, piece, column, live, start)
    if not known:
        total = picked if column.max() >= 0 else torch.full_like(picked, -1.0)
        passes.rescale_shares(out, lse_blocks, lse, total, column, scale)
    return lse_blocks, picked


def check_gradient(
    case: int, device: str, dtype: torch.dtype, known: bool, rounding: float
) -> None:
    """A gradient against its formula in fp64; `rounding` of a unit in the last place."""
    columns, live, at = CASES[case]
    logits, column = live_logits(columns, live), torch.tensor(at)
    z = logits.double()
    lse = z.logsumexp(1)
    shift = lse if column.max() >= 0 else torch.zeros_like(lse)  # lse with the other ranks' shards
    buffer = torch.full((4, columns + 3), NAN, device=device, dtype=dtype)
    lse_blocks, picked = run_passes(logits, live, column, shift.float(), buffer[:, :columns], known)
    if not known:
        torch.testing.assert_close(lse_blocks.cpu().double().logsumexp(1), lse, rtol=1e-6, atol=0)
        want = z.gather(1, column.clamp(min=0)[:, None])[:, 0].where(column >= 0, 0.0)
        torch.testing.assert_close(picked.cpu().double(), want, rtol=0, atol=0)
    want = (z - shift[:, None]).exp()
    hit = column >= 0
    want[torch.arange(4)[hit], column[hit]] -= 1
    want *= SCALE[:, None]
    got = buffer.cpu()[:, :columns].double()
    # 30 * 5 * 2**-24 from the logarithm, the rounding to the type, and float16's of shares
    rtol = 2e-5 + torch.finfo(dtype).eps * rounding + (2**-11 if dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(got, want, rtol=rtol, atol=1e-7)
    assert (got[:, z[0].isinf()] == 0).all()
    assert buffer[:, columns:].isnan().all()


def check_sure_rows(device: str, dtype: torch.dtype, known: bool) -> None:
    """A label of p = 1 - 2.5e-3 keeps its gradient p - 1, though p rounds to 1 in bfloat16."""
    logits, column = torch.tensor([[6.0, 0.0]] * 4), torch.tensor([0, 1, 0, 1])
    lse = logits.double().logsumexp(1)
    out = torch.full((4, 2), NAN, device=device, dtype=dtype)
    run_passes(logits, Live(2, -1), column, lse.float(), out, known)
    want = (logits.double().softmax(1) - torch.eye(2).double()[column]) * SCALE[:, None]
    # lse is off by 2**-22
    torch.testing.assert_close(out.cpu().double(), want, rtol=2e-4 + torch.finfo(dtype).eps, atol=0)


def check_all(device: str, rounding: float = 0.5) -> None:
    """Every case on `device`."""
    narrow = [torch.bfloat16] if device == "cuda" or rounding > 0.5 else []
    for dtype, known in product([torch.float32, *narrow], [True, False]):
        check_sure_rows(device, dtype, known)
    for case, dtype, known in product(range(len(CASES)), [torch.float32, *narrow], [True, False]):
        check_gradient(case, device, dtype, known, rounding)
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(device)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((3, 5), NAN, device=device, dtype=dtype)
        passes.write_scaled(out, x, torch.tensor(0.7, device=device, dtype=torch.float64))
        rtol = 1e-6 + torch.finfo(dtype).eps * rounding
        torch.testing.assert_close(out.float(), x * 0.7, rtol=rtol, atol=0)


def test_torch_passes_equal_their_formulas() -> None:
    check_all("cpu")


def test_triton_passes_equal_their_formulas_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(__file__)


if __name__ == "__main__":
    passes._has_kernels = lambda x: True  # sends CPU tensors to the kernels
    check_all("cpu", rounding=1.0)  # the interpreter truncates to bfloat16
