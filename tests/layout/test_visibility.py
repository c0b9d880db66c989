"""The four columns a row equal a brute-force transcription of the method's mask predicate."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.layout.owners import Rows
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.visibility import (
    CleanRule,
    CorruptedRule,
    MaskRules,
    Visibility,
    dense_mask,
    visibility_of,
)
from tests.layout.test_decomposition import requests


class Mask:
    """The predicate over (query, key) of facts 2.1, one pair at a time, from the request alone.

    A corrupted query of block b sees the clean keys of blocks [0, b) and its own block of its own
    view. A clean query sees the clean blocks [0, b + 1) (block-level) or tokens [0, p + 1)
    (token-level). A window of W cuts the keys before the block (a token-level clean query: before
    itself) to the last W - 1. Documents never see one another.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        documents = request.documents or ((0, request.length),)
        prompts = request.prompts or (0,) * len(documents)
        self.name = {}
        for d, ((lo, hi), prompt) in enumerate(zip(documents, prompts, strict=True)):
            for p in range(lo, hi):
                in_prompt = p < lo + prompt
                offset = p - lo if in_prompt else p - lo - prompt
                self.name[p] = (d, 0 if in_prompt else 1, offset // request.block_size)
        self.start = {}
        for p in sorted(self.name, reverse=True):
            self.start[self.name[p]] = p

    def __call__(self, query: tuple[int, int], key: tuple[int, int]) -> bool:
        (q_stream, q), (k_stream, k) = query, key
        mine, other = self.name[q], self.name[k]
        window = self.request.window
        if mine[0] != other[0]:
            return False
        if k_stream > 0:
            causal = self.request.corrupted_rule is CorruptedRule.CAUSAL
            return q_stream == k_stream and mine == other and not (causal and k > q)
        if q_stream == 0 and self.request.clean_rule is CleanRule.TOKEN_CAUSAL:
            return k <= q and (not window or k > q - window)
        near = not window or k >= self.start[mine] - (window - 1)
        return near and (other <= mine if q_stream == 0 else other < mine)


def names(rows: Rows) -> list[tuple[int, int]]:
    """(stream, position) of each row."""
    return list(zip(rows.stream.tolist(), rows.position.tolist(), strict=True))


@settings(max_examples=120, deadline=None)
@given(requests(), st.integers(1, 24))
def test_mask_equals_the_brute_force_predicate(request: PlanRequest, length: int) -> None:
    one = replace(request, num_ranks=1, num_clean_shards=1, gather_corrupted=False)
    if request.length > length:  # keep the pair loop short
        prompts = tuple(min(p, length) for p in request.prompts)
        one = replace(one, length=length, documents=(), prompts=prompts)
    plan = make_plan(one, 0)
    allowed = Mask(one)
    coordinate, clean = plan.rows.coordinate, plan.rows.num_clean
    mask = dense_mask(plan.visibility, coordinate[:clean], coordinate[clean:])
    named = names(plan.rows)
    want = [[min(q[0], k[0]) >= 0 and allowed(q, k) for k in named] for q in named]
    np.testing.assert_array_equal(mask, np.array(want))
    assert plan.visibility.num_pairs == np.sum(want)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_packed_documents_equal_the_brute_force_predicate(request: PlanRequest) -> None:
    one = PlanRequest(
        length=20,
        block_size=min(request.block_size, 5),
        num_views=request.num_views,
        clean_rule=request.clean_rule,
        corrupted_rule=request.corrupted_rule,
        window=request.window,
        documents=((0, 7), (7, 8), (8, 20)),
        prompts=(2, 1, 5),
    )
    plan = make_plan(one, 0)
    allowed = Mask(one)
    coordinate, clean = plan.rows.coordinate, plan.rows.num_clean
    mask = dense_mask(plan.visibility, coordinate[:clean], coordinate[clean:])
    named = names(plan.rows)
    np.testing.assert_array_equal(mask, [[allowed(q, k) for k in named] for q in named])


@settings(max_examples=200, deadline=None)
@given(requests())
def test_no_leak_a_corrupted_row_never_sees_its_own_block_clean(request: PlanRequest) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        corrupted = plan.rows.stream > 0
        block = plan.rows.block[corrupted]
        assert (plan.visibility.clean_hi[corrupted] <= plan.blocks.start[block]).all()
        assert (plan.visibility.clean_lo[corrupted] <= plan.visibility.clean_hi[corrupted]).all()
        assert (plan.visibility.clean_lo[corrupted] >= plan.blocks.document_start[block]).all(), (
            "a row sees an earlier document"
        )


@settings(max_examples=150, deadline=None)
@given(requests())
def test_own_keys_are_of_the_rows_own_view_and_block(request: PlanRequest) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        rows, seen = plan.rows, plan.visibility
        corrupted = rows.stream > 0
        base = ((rows.stream - 1) * request.length)[corrupted]
        block = rows.block[corrupted]
        np.testing.assert_array_equal(seen.own_lo[corrupted], base + plan.blocks.start[block])
        assert (seen.own_hi[corrupted] <= base + plan.blocks.stop[block]).all()
        assert (seen.own_hi[corrupted] > rows.coordinate[corrupted]).all(), "a row sees itself"
        assert (seen.own_hi[~corrupted] == 0).all(), "clean rows never see corrupted keys"


@settings(max_examples=100, deadline=None)
@given(requests())
def test_padding_rows_see_nothing(request: PlanRequest) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        padding = plan.rows.stream < 0
        seen = plan.visibility
        assert (seen.clean_lo[padding] == seen.clean_hi[padding]).all()
        assert (seen.own_lo[padding] == seen.own_hi[padding]).all()


@settings(max_examples=60, deadline=None)
@given(requests())
def test_a_window_as_long_as_the_sample_changes_nothing(request: PlanRequest) -> None:
    open_plan = make_plan(replace(request, window=0), 0)
    wide = make_plan(replace(request, window=2 * request.length), 0)
    for name in ("clean_lo", "clean_hi", "own_lo", "own_hi"):
        np.testing.assert_array_equal(
            getattr(open_plan.visibility, name), getattr(wide.visibility, name)
        )


def columns(seen: Visibility) -> list[tuple[int, int, int, int]]:
    """Columns as rows, for examples."""
    return [
        tuple(map(int, row))
        for row in zip(seen.clean_lo, seen.clean_hi, seen.own_lo, seen.own_hi, strict=True)
    ]


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        (
            MaskRules(CleanRule.TOKEN_CAUSAL, CorruptedRule.BIDIRECTIONAL),
            [(0, 6, 0, 0), (0, 4, 4, 8), (0, 4, 14, 18)],
        ),
        (
            MaskRules(CleanRule.BLOCK_CAUSAL, CorruptedRule.CAUSAL),
            [(0, 8, 0, 0), (0, 4, 4, 6), (0, 4, 14, 16)],
        ),
        (
            MaskRules(CleanRule.TOKEN_CAUSAL, CorruptedRule.BIDIRECTIONAL, window=3),
            [(3, 6, 0, 0), (2, 4, 4, 8), (2, 4, 14, 18)],
        ),
        (
            MaskRules(CleanRule.BLOCK_CAUSAL, CorruptedRule.BIDIRECTIONAL, window=1),
            [(4, 8, 0, 0), (4, 4, 4, 8), (4, 4, 14, 18)],
        ),
    ],
)
def test_the_row_at_position_five(rules: MaskRules, want: list) -> None:
    blocks = PlanRequest(length=10, block_size=4).blocks
    at = np.array([5, 5, 5])
    assert columns(visibility_of(np.array([0, 1, 2]), at, blocks, rules)) == want


def test_dense_mask_never_shows_a_padding_key() -> None:
    plan = make_plan(PlanRequest(length=4, block_size=4), 0)
    mask = dense_mask(plan.visibility, np.array([-1, 0]), np.array([-1, 3]))
    assert not mask[:, [0, 2]].any()
    assert mask[:4, 1].all()
    assert mask[4:, 3].all()


def test_columns_are_int32() -> None:
    seen = make_plan(PlanRequest(length=4, block_size=4), 0).visibility
    assert {getattr(seen, c).dtype for c in ("clean_lo", "clean_hi", "own_lo", "own_hi")} == {
        np.dtype(np.int32)
    }


def test_refuses_a_negative_window() -> None:
    with pytest.raises(ValueError, match=r"window=-1 must be 0 \(none\) or a positive"):
        MaskRules(CleanRule.TOKEN_CAUSAL, CorruptedRule.CAUSAL, window=-1)
