"""Views of operands hold what a launch's problems read and add to, element by element."""

import pytest
import torch
from torch import Tensor

from megatron_bp.attention.contract import Window
from megatron_bp.attention.operands import KeyLayout, Operands, RowLayout, operands, whole
from megatron_bp.attention.sharing import SharedLaunch
from megatron_bp.attention.views import View, views_of
from megatron_bp.layout.decomposition import KeySpace

SAMPLES, HEADS, KV_HEADS, SIZE, WIDE, TILE = 2, 4, 2, 3, 4, 4
ROWS, KEYS, RUNS, PADDED_KEYS = 22, 30, 3, 12

COMMON = SharedLaunch(2, 4, 8, 8, KeySpace.CLEAN, 3, 7, 6, Window(), 0, 4, PADDED_KEYS)
OWN = SharedLaunch(3, 0, 0, 6, KeySpace.CLEAN, 1, 0, 9, Window(), 0, 2 * PADDED_KEYS, 0)


def numbered(*shape: int, shift: int = 0) -> Tensor:
    """Different numbers, `shift` elements into their memory, every second element of the heads."""
    wide = torch.arange(shift + 2 * torch.Size(shape).numel(), dtype=torch.float64)
    return wide[shift:].view(*shape[:-2], 2 * shape[-2], shape[-1])[..., ::2, :]


def layouts(q: Tensor, dout: Tensor, k: Tensor, v: Tensor) -> tuple[RowLayout, KeyLayout]:
    """Of rows [B, Q, N, H] and keys [S, Z, M, H]."""
    padded = whole(q.shape[1], TILE)
    rows = RowLayout(SAMPLES, len(q), HEADS, SIZE, WIDE, TILE, padded, q.stride(), dout.stride())
    return rows, KeyLayout(KV_HEADS, TILE, PADDED_KEYS, RUNS, k.stride(), v.stride())


@pytest.mark.parametrize("launch", [COMMON, OWN], ids=["common", "own"])
@pytest.mark.parametrize("sample", range(SAMPLES))
def test_views_hold_what_the_problems_read_and_add_to(launch: SharedLaunch, sample: int) -> None:
    batch = SAMPLES if launch is COMMON else SAMPLES * launch.num_problems
    q, dout = (numbered(batch, ROWS, HEADS, SIZE, shift=x) for x in (5, 0))
    k, v = (numbered(KEYS, SAMPLES, KV_HEADS, SIZE, shift=x) for x in (0, 6))
    rows, keys = layouts(q, dout, k, v)
    known = torch.arange(2.0 * batch * HEADS * rows.padded).view(2, batch, HEADS, -1)
    sums = torch.arange(1.0 * batch * HEADS * rows.padded * WIDE).view(batch, HEADS, -1)
    key_sums = torch.arange(2.0 * SAMPLES * RUNS * KV_HEADS * PADDED_KEYS * WIDE)
    views = operands(launch, rows, keys, sample)
    tensors = Operands(q, k, v, dout, known, known, sums, key_sums, key_sums)  # type: ignore[arg-type]
    got = Operands(*views_of(views, tensors))  # type: ignore[arg-type]
    tall, long = whole(launch.num_rows, TILE), whole(launch.num_keys, TILE)
    by_run = key_sums.view(2, SAMPLES, RUNS, KV_HEADS, PADDED_KEYS, WIDE)
    for x in range(launch.num_problems):
        at = sample if launch is COMMON else x * SAMPLES + sample
        row = launch.row + x * launch.row_step
        for view, whole_rows in ((got.q, q), (got.dout, dout)):
            assert torch.equal(view[x], whole_rows[at, row : row + launch.num_rows])
        for view, part in ((got.row_sum, known[0]), (got.lse, known[1])):
            assert torch.equal(view[x], part[at, :, row : row + tall])
        dq = sums.view(batch, HEADS, -1, WIDE)[at, :, row : row + tall]
        assert torch.equal(got.dq[x], dq.flatten(1))
        key = launch.key + x * launch.key_step
        for view, whole_keys in ((got.k, k), (got.v, v)):
            assert torch.equal(view[x], whole_keys[key : key + launch.num_keys, sample])
        run, first = divmod(launch.offset + x * launch.offset_step, PADDED_KEYS)
        for view, part in ((got.dk, by_run[0]), (got.dv, by_run[1])):
            into = part[sample, run, :, first : first + long]
            assert torch.equal(view[x], into.flatten(1))


def test_equal_launches_and_layouts_ask_once() -> None:
    q, k = numbered(SAMPLES, ROWS, HEADS, SIZE), numbered(KEYS, SAMPLES, KV_HEADS, SIZE)
    first = operands(COMMON, *layouts(q, q, k, k), 0)
    assert operands(COMMON._replace(), *layouts(q, q, k, k), 0) is first
    assert operands(COMMON, *layouts(q, q[:, 1:], k, k), 0) is first  # offsets are not of a layout
    for other in (layouts(q, q.contiguous(), k, k), layouts(q, q, k, k.contiguous())):
        assert operands(COMMON, *other, 0) != first


def test_a_view_begins_after_a_tensors_first_element() -> None:
    x = torch.arange(12.0)[2:]
    assert View((2, 2), (4, 1), 1).of(x).tolist() == [[3, 4], [7, 8]]
