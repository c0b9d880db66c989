"""Block lists and key intervals say exactly what an interval mask says."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.attention.block_lists import BlockLists, MaskKey, block_lists, key_intervals
from megatron_bp.attention.contract import IntervalMask
from megatron_bp.attention.interval import interval_mask
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.layout.test_decomposition import requests

CPU = torch.device("cpu")


def blocks_of(lists: BlockLists, num_cols: int) -> np.ndarray:
    """0 for blocks in no list, 1 for partial ones, 2 for full ones."""
    kinds = np.zeros((len(lists.partial.num), num_cols), dtype=int)
    for kind, part in ((1, lists.partial), (2, lists.full)):
        for row, (num, which) in enumerate(zip(part.num, part.which, strict=True)):
            assert (kinds[row, which[:num].numpy()] == 0).all()
            kinds[row, which[:num].numpy()] = kind
    return kinds


@settings(max_examples=40, deadline=None)
@given(requests(), st.sampled_from([2, 3, 8]), st.sampled_from([2, 5, 8]))
def test_lists_hold_every_block_that_the_mask_meets(
    request: PlanRequest, rows: int, cols: int
) -> None:
    plan = make_plan(request, request.num_ranks - 1)
    mask = interval_mask(plan, 0, CPU)
    dense = mask.dense().numpy()
    num_rows, num_cols = -(-dense.shape[0] // rows), -(-dense.shape[1] // cols)
    want = np.zeros((num_rows, num_cols), dtype=int)
    for i in range(num_rows):
        for j in range(num_cols):
            # Rows beyond the last one may count as anything: only real pairs decide.
            tile = dense[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols]
            want[i, j] = 2 if tile.all() else 1 if tile.any() else 0
    by_query, by_key = block_lists(MaskKey(mask), rows, cols)
    found = blocks_of(by_query, num_cols)
    np.testing.assert_array_equal(found, blocks_of(by_key, num_rows).T)
    assert ((found > 0) >= (want > 0)).all()
    assert ((found == 2) <= (want == 2)).all()


@settings(max_examples=40, deadline=None)
@given(requests())
def test_intervals_of_key_rows_give_the_same_mask(request: PlanRequest) -> None:
    mask = interval_mask(make_plan(request, 0), 0, CPU)
    at, key = key_intervals(MaskKey(mask)), torch.arange(len(mask.key_name))
    clean = (key >= at.lo[:, None]) & (key < at.hi[:, None])
    own = (key >= at.own_lo[:, None]) & (key < at.own_hi[:, None])
    assert torch.equal(clean | own, mask.dense())


def test_keys_in_several_runs_are_refused() -> None:
    column = torch.tensor([0], dtype=torch.int32)
    names = torch.tensor([1, 0, 2], dtype=torch.int32)  # positions out of order
    mask = IntervalMask(column, column + 3, column, column, names, 3)
    with pytest.raises(ValueError, match="in one run of rows"):
        key_intervals(MaskKey(mask))
