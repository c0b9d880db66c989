"""The small-problem kernel equals the dense kernel, merged into what was there before.

Without a GPU it runs in Triton's interpreter, in a process of its own because the interpreter is
chosen when Triton is imported.
"""

from itertools import product, starmap
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_bp.attention import bench, native
from megatron_bp.attention.contract import Saved, Strategy, Window, window_mask
from megatron_bp.attention.kernels.dense import DenseKernel, attend, attend_backward
from megatron_bp.attention.merge import merge
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.interpreted import run_interpreted

small = pytest.importorskip("megatron_bp.attention.triton_small")

# problems, rows, samples, key/value heads, group, head size, keys of the three runs, window
CASES = [
    (3, 5, 2, 2, 3, 16, (5, 5, 0), Window(4, -1)),  # a block with the block before it
    (2, 4, 1, 1, 2, 24, (0, 4, 0), Window()),  # an own block alone
    (2, 7, 1, 2, 1, 16, (7, 0, 0), Window(-1, 0)),  # the far end of a window alone
    (1, 3, 2, 1, 4, 8, (2, 3, 0), Window(4, 0)),  # a ragged causal block
    (3, 5, 2, 2, 2, 16, (5, 5, 4), Window(4, -1)),  # a block with both ends of its window
    (1, 20, 1, 1, 7, 8, (20, 20, 0), Window(19, -1)),  # several tiles of rows
    (1, 20, 1, 1, 7, 8, (20, 20, 19), Window(19, -1)),
    (2, 5, 1, 1, 2, 16, (4, 5, 2), Window(4, 0)),  # the far end cut short by a document
    (1, 5, 2, 1, 3, 136, (5, 5, 0), Window(4, -1)),  # heads in slices, the last one not whole
    (1, 20, 1, 1, 7, 136, (20, 20, 0), Window(19, -1)),  # and in several tiles of rows
    (1, 4, 1, 1, 2, 136, (4, 4, 3), Window(3, -1)),  # a far end beside large heads
]


class Mode(NamedTuple):
    """Results overwrite their rows; the clean run's gradients are added to theirs; the backward
    gets rowsum(dout * out) instead of the output; gradients of clean keys are added in any order.
    """

    store: bool
    direct: bool
    summed: bool
    races: bool = False


MODES = [*starmap(Mode, product((False, True), repeat=3)), Mode(False, True, True, True)]


def mask_of(rows: int, lengths: tuple[int, int, int], window: Window) -> Tensor:
    """Which keys of the three runs, one after another, each row sees."""
    near, far = lengths[0] + lengths[1], lengths[2]
    end = torch.zeros(rows, far, dtype=torch.bool)
    end[rows - far :] = torch.ones(far, far, dtype=torch.bool).tril()
    return torch.cat([window_mask(rows, near, window, end.device), end], 1)


def problems_of(case: tuple, device: str) -> tuple[small.Problems, Tensor, list[Tensor]]:
    """Problems in disorder with gaps between them, and the index of their rows and keys."""
    count, rows, *_, lengths, window = case
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2))
    clean = order * (lengths[0] + 1)
    starts = torch.stack([order * (rows + 1), clean, order * (lengths[1] + 1), clean + 3])
    index = [
        (start[:, None] + torch.arange(length)).to(device)
        for start, length in zip(starts, (rows, *lengths), strict=True)
    ]
    return small.Problems(starts.to(device), rows, lengths, window), index[0], index[1:]


def check(case: tuple, mode: Mode, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Output, LSE and gradients of one case, with rows beside the problems left alone."""
    store, direct, summed, races = mode
    count, rows, samples, kv_heads, group, size, lengths, window = case
    todo, at, key_at = problems_of(case, device)
    num_rows, generator = count * (rows + 1), torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def flat(x: Tensor) -> Tensor:  # [X, Q, Z, ...] as the dense kernel takes it
        return x.transpose(1, 2).flatten(0, 1).float()

    q, out, dout, dq = (draw(num_rows, samples, kv_heads * group, size) for _ in range(4))
    lse = draw(samples, kv_heads * group, num_rows).float().permute(2, 0, 1)
    lse[::3] = float("-inf")
    out[::3] = 0
    both = [draw(40, samples, 2, kv_heads, size) for _ in range(4)]
    both[2] = both[2].float() if races else both[2]
    keys, grads = (
        small.Keys((a[:, :, 0], a[:, :, 1]), (b[:, :, 0], b[:, :, 1]))
        for a, b in (both[:2], both[2:])
    )
    keys = keys._replace(own=(keys.own[0], keys.own[1].contiguous()))  # they need not lie alike
    spaces = [(0, key_at[0]), (1, key_at[1]), (0, key_at[2])]
    k, v = (torch.cat([flat(keys[s][part][i]) for s, i in spaces], 1) for part in range(2))
    mask, scale = mask_of(rows, lengths, window).to(device), size**-0.5
    want, part_lse = attend(flat(q[at]), k, v, mask, scale)
    want_lse = part_lse.transpose(1, 2)
    if store:
        out[at], lse[at], dq[at] = float("nan"), float("nan"), float("nan")
    else:
        want, want_lse = merge(flat(out[at]), flat(lse[at]), want, want_lse)
    before = out.clone()
    small.forward_into(q, keys, todo, scale, (out, lse), store=store)
    close = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(flat(out[at]), want, **close)
    torch.testing.assert_close(flat(lse[at]), want_lse, rtol=1e-5, atol=1e-5)
    gap = torch.ones(num_rows, dtype=torch.bool, device=device)
    gap[at] = False
    assert torch.equal(out[gap], before[gap])
    saved = Saved(flat(q[at]), k, v, flat(out[at]), flat(lse[at]).transpose(1, 2))
    exact = attend_backward(flat(dout[at]), saved, mask, scale)
    want_dq = exact[0] if store else exact[0] + flat(dq[at])
    wanted = [x.unflatten(0, (count, samples)).transpose(1, 2).split(lengths, 1) for x in exact[1:]]
    expected = [[x.float() for x in pair] for pair in grads]
    for part, (clean, own, far) in enumerate(wanted):
        if direct:
            expected[0][part][key_at[0]] = clean + (0 if store else expected[0][part][key_at[0]])
        expected[1][part][key_at[1]] = own + (0 if store else expected[1][part][key_at[1]])
        for ends, value in zip(key_at[2], far, strict=True) if races else ():
            expected[0][part][ends] += value  # rows of several problems
    if store:
        for part in range(2):
            if direct:
                grads.clean[part][key_at[0]] = float("nan")
            grads.own[part][key_at[1]] = float("nan")
    sums = (out.float() * dout.float()).sum(-1).permute(1, 2, 0).contiguous().permute(2, 0, 1)
    left = small.backward_into(
        small.Rows(q, sums if summed else out, lse, dout),
        keys,
        todo,
        scale,
        (dq, grads),
        small.Stores(rows=store, clean=store, own=store, direct=direct, races=races),
    )
    torch.testing.assert_close(flat(dq[at]), want_dq, **close)
    for part in range(2):
        torch.testing.assert_close(grads.clean[part].float(), expected[0][part], **close)
        torch.testing.assert_close(grads.own[part].float(), expected[1][part], **close)
        ends = wanted[part][2][:, :0] if races else wanted[part][2]
        torch.testing.assert_close(left[1][part].float(), ends, **close)
        if not direct:
            torch.testing.assert_close(left[0][part].float(), wanted[part][0], **close)


def check_all(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Every case on `device`."""
    for case in CASES:
        for mode in MODES:
            check(case, mode, device, dtype, tolerance)


def test_a_far_end_goes_along_only_while_everything_stays_in_registers() -> None:
    assert small.fits(32, 64, 31, 128)
    assert not small.fits(32, 65, 31, 128)
    assert not small.fits(32, 64, 31, 256)
    assert small.fits(32, 64, 0, 256)
    assert not small.fits(small.MAX_ROWS + 1, 64, 0, 64)


def test_small_problems_equal_the_dense_kernel_in_the_interpreter() -> None:
    run_interpreted(__file__)


def check_layer(shape: bench.Shape, views: int) -> None:
    """A rank's whole layer with the kernel in its place, against the dense mask."""
    for rank in range(2):
        case = bench.Case(shape, 96, 2, rank, num_views=views)
        layer = bench.Layer(case, Strategy.NATIVE, "dense")
        errors = bench.errors(layer, torch.device("cpu"), torch.float32)
        assert max(errors.values()) < 1e-5, errors


def check_shared(window: int, most_rows: int) -> None:
    """Gradients of a layer whose launches over more rows than that share accumulators: small ones
    get row sums, and add to clean keys in any order, their far ends too.
    """
    from tests.attention.test_sharing import SharingDense, gradients

    seen = []
    backward_into, runs_small = small.backward_into, native._runs_small

    def noted(rows: small.Rows, keys: small.Keys, todo: small.Problems, *args: Any) -> Any:
        seen.append((rows.out.ndim, args[-1].races, todo.lengths[2] > 0))
        return backward_into(rows, keys, todo, *args)

    small.backward_into, native._runs_small = noted, lambda _: True
    small.MAX_ROWS = most_rows
    request = PlanRequest(length=96, block_size=8, num_ranks=2, num_clean_shards=2, window=window)
    plan = make_plan(request, 1)
    found = gradients(plan, SharingDense(), corrupted_only=False)
    assert {ndim for ndim, *_ in seen} == {3}, "nobody handed over row sums"
    assert (3, True, window > 0) in seen, seen
    native._runs_small = lambda _: False
    for got, want in zip(found, gradients(plan, DenseKernel(), corrupted_only=False), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    small.backward_into, native._runs_small = backward_into, runs_small


def _interpret() -> None:
    check_all("cpu", torch.float32, 1e-5)
    native._runs_small = lambda _: True
    for views in (1, 2):
        check_layer(bench.Shape(4, 2, 16, block_size=8, window=20), views)
        check_layer(bench.Shape(2, 2, 16, block_size=8), views)
    check_shared(window=20, most_rows=8)
    check_shared(window=0, most_rows=256)  # some are the first to write their clean keys


if __name__ == "__main__":
    _interpret()
