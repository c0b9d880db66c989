"""Packing uses every document once, never cuts one, and depends on seed and epoch alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.data.packing import (
    PADDING,
    document_of_position,
    document_spans,
    pack_epoch,
    used_length,
)
from megatron_bp.layout.blocks import make_blocks

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(0, 5), st.integers(0, 3))
def test_every_document_is_in_exactly_one_sample_that_holds_it(
    lengths: list[int], seed: int, epoch: int
) -> None:
    samples = pack_epoch(np.array(lengths), 40, seed, epoch)
    assert sorted(d for sample in samples for d in sample) == list(range(len(lengths)))
    assert all(0 < sum(lengths[d] for d in sample) <= 40 for sample in samples)


@settings(max_examples=50, deadline=None)
@given(LENGTHS)
def test_no_two_samples_are_half_empty(lengths: list[int]) -> None:
    """Best fit opens a sample only for a document that fits nowhere."""
    used = sorted(
        sum(lengths[d] for d in sample) for sample in pack_epoch(np.array(lengths), 40, 1, 0)
    )
    assert len(used) < 2 or used[0] + used[1] > 40


def test_the_order_depends_on_seed_and_epoch_and_nothing_else() -> None:
    lengths = np.random.Generator(np.random.Philox(key=1)).integers(1, 200, 500)
    first = pack_epoch(lengths, 512, 7, 0)
    assert first == pack_epoch(lengths, 512, 7, 0)
    others = [pack_epoch(lengths, 512, seed, epoch) for seed, epoch in ((7, 1), (8, 0))]
    assert len({first, *others}) == 3


def test_realistic_lengths_leave_little_padding() -> None:
    drawn = np.random.Generator(np.random.Philox(key=2))
    lengths = np.clip(drawn.lognormal(5.5, 1.0, 3000), 8, 4096).astype(int)
    samples = pack_epoch(lengths, 4096, 1, 0)
    assert lengths.sum() / (4096 * len(samples)) > 0.98


@pytest.mark.parametrize("bad", [0, 41])
def test_a_document_that_does_not_fit_is_named(bad: int) -> None:
    with pytest.raises(ValueError, match=f"document 1 has {bad}.*--max-length 40"):
        pack_epoch(np.array([3, bad]), 40, 1, 0)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(0, 30), st.integers(1, 9))
def test_spans_are_the_documents_and_then_blocks_of_padding(
    lengths: list[int], room: int, block: int
) -> None:
    total = sum(lengths)
    document = document_of_position(lengths, total + room)
    assert used_length(document) == total
    assert (document[total:] == PADDING).all()
    spans = document_spans(document, block)
    make_blocks(total + room, block, spans)  # adjacent, non-empty and covering, or it raises
    assert [hi - lo for lo, hi in spans[: len(lengths)]] == lengths
    assert all(hi - lo <= block for lo, hi in spans[len(lengths) :])


def test_a_sample_of_padding_has_spans_too() -> None:
    document = document_of_position([], 10)
    assert document_spans(document, 4) == ((0, 4), (4, 8), (8, 10))
