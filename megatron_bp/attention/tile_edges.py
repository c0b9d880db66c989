"""Which tiles of an attention launch a mask cuts, as opposed to those that it leaves whole.

Takes integers, or what a kernel has in their place while it is compiled.
Specified by tests/attention/test_tile_edges.py.
"""

from typing import Any, NamedTuple


class Span(NamedTuple):
    """Rows or keys [first, stop) of a tile."""

    first: Any
    stop: Any


def beyond_keys(keys: Span, num_keys: Any) -> Any:
    """Whether a tile has keys that do not exist."""
    return keys.stop > num_keys


def right_of(rows: Span, keys: Span, shift: Any, right: Any) -> Any:
    """Whether a row of a tile does not see a key of it because of the right bound.

    Row a sees keys up to a + shift + right; `shift` is the number of keys less that of rows.
    """
    return keys.stop - 1 > rows.first + shift + right


def left_of(rows: Span, keys: Span, shift: Any, left: Any) -> Any:
    """The same of the left bound: row a sees keys from a + shift - left on."""
    return keys.first < rows.stop - 1 + shift - left
