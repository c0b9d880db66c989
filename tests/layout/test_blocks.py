"""Blocks cover a sample exactly once and never cross a document or a prompt."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bp.layout.blocks import Spans, make_blocks


@st.composite
def samples(draw: st.DrawFn) -> tuple[int, int, Spans, tuple[int, ...]]:
    """Length, block size, documents and prompts of a random sample."""
    length, block_size = draw(st.integers(1, 80)), draw(st.integers(1, 12))
    cuts = draw(st.sets(st.integers(1, 79), max_size=5))
    documents = tuple(pairwise([0, *sorted(c for c in cuts if c < length), length]))
    prompts = tuple(draw(st.integers(0, hi - lo)) for lo, hi in documents)
    return length, block_size, documents, prompts if draw(st.booleans()) else ()


@settings(max_examples=200, deadline=None)
@given(samples())
def test_blocks_cover_the_sample_exactly_in_position_order(
    sample: tuple[int, int, Spans, tuple[int, ...]],
) -> None:
    length, block_size, documents, prompts = sample
    table = make_blocks(length, block_size, documents, prompts)
    covered = [p for a, z in zip(table.start, table.stop, strict=True) for p in range(a, z)]
    assert covered == list(range(length))
    assert table.num_blocks == len(table.stop) == len(table.document) == len(table.document_start)
    of_position = table.of_position
    assert (table.start[of_position] <= np.arange(length)).all()
    assert (np.arange(length) < table.stop[of_position]).all()


@settings(max_examples=200, deadline=None)
@given(samples())
def test_a_block_is_short_only_at_the_end_of_its_prompt_or_document(
    sample: tuple[int, int, Spans, tuple[int, ...]],
) -> None:
    length, block_size, documents, prompts = sample
    table = make_blocks(length, block_size, documents, prompts)
    offsets = prompts or (0,) * len(documents)
    for block in range(table.num_blocks):
        start, stop = int(table.start[block]), int(table.stop[block])
        lo, hi = documents[table.document[block]]
        response = lo + offsets[table.document[block]]
        assert table.document_start[block] == lo
        assert lo <= start < stop <= hi
        assert stop <= response or start >= response, "a block crosses the end of the prompt"
        ends_here = stop in (response, hi)
        assert stop - start == block_size or (stop - start < block_size and ends_here)


def test_the_last_block_is_ragged_when_the_length_is_no_multiple() -> None:
    table = make_blocks(10, 4)
    assert table.start.tolist() == [0, 4, 8]
    assert table.stop.tolist() == [4, 8, 10]


def test_blocks_restart_at_documents_and_after_prompts() -> None:
    table = make_blocks(20, 4, ((0, 9), (9, 20)), (0, 5))
    assert table.start.tolist() == [0, 4, 8, 9, 13, 14, 18]
    assert table.document.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert table.document_start.tolist() == [0, 0, 0, 9, 9, 9, 9]


def test_a_prompt_may_fill_its_document() -> None:
    assert make_blocks(6, 4, (), (6,)).start.tolist() == [0, 4]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, 4), "length=0 and block_size=4 must both be at least 1; use for example length=4096"),
        ((8, 0), "length=8 and block_size=0 must both be at least 1"),
        ((8, 4, ((0, 4),)), "documents=((0, 4),) must be non-empty, adjacent and cover [0, 8); "),
        ((8, 4, ((1, 8),)), "use for example ((0, 8),)."),
        ((8, 4, ((0, 5), (4, 8))), "must be non-empty, adjacent and cover [0, 8)"),
        ((8, 4, ((0, 3), (4, 8))), "must be non-empty, adjacent and cover [0, 8)"),
        ((8, 4, ((0, 0), (0, 8))), "must be non-empty, adjacent and cover [0, 8)"),
        ((8, 4, (), (1, 2)), "2 prompts were given for 1 documents; give one prompt length"),
        ((8, 4, (), (9,)), "prompt 0 has 9 tokens but its document has 8; use a value in [0, 8]."),
        ((8, 4, (), (-1,)), "prompt 0 has -1 tokens but its document has 8"),
    ],
)
def test_refuses_what_does_not_tile_and_says_what_would(arguments: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        make_blocks(*arguments)
