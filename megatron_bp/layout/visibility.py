"""Says which keys each row may see, as four int32 columns a row: the mask, written once.

A row sees the clean keys of [clean_lo, clean_hi) and the corrupted keys of [own_lo, own_hi).
Corrupted keys are named by their own coordinate, view * length + position, so that views never
see one another. Knows nothing of ranks or tensors. Specified by tests/layout/test_visibility.py.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.blocks import BlockTable


class CleanRule(StrEnum):
    """What a clean row sees of the clean stream (facts differ by model family)."""

    TOKEN_CAUSAL = "token_causal"  # keys up to itself: CSBP paper, Nemotron, I-DLM
    BLOCK_CAUSAL = "block_causal"  # keys up to the end of its block: BD3-LM, SDAR, Fast-dLLM v2


class CorruptedRule(StrEnum):
    """What a corrupted row sees of its own corrupted block."""

    BIDIRECTIONAL = "bidirectional"
    CAUSAL = "causal"


@dataclass(frozen=True)
class Visibility:
    """Half-open key intervals of each row; an interval is empty when its ends are equal.

    Shapes: all int32 [T]. Units: clean positions, and own coordinates (view * length + position).
    Guarantee: a corrupted row's `clean_hi` never passes the start of its block (no leak).
    """

    clean_lo: NDArray[np.int32]
    clean_hi: NDArray[np.int32]
    own_lo: NDArray[np.int32]
    own_hi: NDArray[np.int32]

    @property
    def num_pairs(self) -> int:
        """Number of (row, key) pairs that are allowed."""
        clean = self.clean_hi.astype(np.int64) - self.clean_lo
        own = self.own_hi.astype(np.int64) - self.own_lo
        return int(clean.sum() + own.sum())


@dataclass(frozen=True)
class MaskRules:
    """The rules one attention layer follows. `window` is in tokens; 0 means none.

    A window of W lets a token-causal clean row at p see (p - W, p], and every row of a block that
    starts at s see [s - (W - 1), s) of the stream before it: the whole block shares the W - 1 keys
    just before it, like an inference cache. The own block is always seen as the rule says.
    """

    clean: CleanRule
    corrupted: CorruptedRule
    window: int = 0

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window={self.window} must be 0 (none) or a positive token count.")


def visibility_of(
    stream: NDArray[np.int64], position: NDArray[np.int64], blocks: BlockTable, rules: MaskRules
) -> Visibility:
    """Key intervals of the rows at `position` of `stream` (0 clean, 1.. corrupted, -1 padding).

    Shapes: `stream`, `position` int64 [T]. Padding rows see nothing.
    """
    real = stream >= 0
    at = np.where(real, position, 0)
    block = blocks.of_position[at]
    start, stop, first = blocks.start[block], blocks.stop[block], blocks.document_start[block]
    clean_row = stream == 0
    whole_block = (rules.clean is CleanRule.BLOCK_CAUSAL) | ~clean_row
    hi = np.where(clean_row, np.where(whole_block, stop, at + 1), start)
    lo = first
    if rules.window:
        anchor = np.where(whole_block, start, at)
        lo = np.minimum(np.maximum(first, anchor - (rules.window - 1)), hi)
    base = (stream - 1) * blocks.length
    own_hi = at + 1 if rules.corrupted is CorruptedRule.CAUSAL else stop
    corrupted = stream > 0

    def column(values: NDArray[np.int64], keep: NDArray[np.bool_]) -> NDArray[np.int32]:
        return np.where(keep, values, 0).astype(np.int32)

    return Visibility(
        clean_lo=column(lo, real),
        clean_hi=column(hi, real),
        own_lo=column(base + start, corrupted),
        own_hi=column(base + own_hi, corrupted),
    )


def dense_mask(
    visibility: Visibility, clean_position: NDArray[np.int64], own_coordinate: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The same mask as a matrix, for references and tests: bool [T, num_clean + num_own].

    Shapes: `clean_position` [num_clean] and `own_coordinate` [num_own] name the keys; -1 is a
    key that nothing sees.
    """

    def inside(
        lo: NDArray[np.int32], hi: NDArray[np.int32], key: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        return (lo[:, None] <= key[None]) & (key[None] < hi[:, None]) & (key[None] >= 0)

    return np.concatenate(
        [
            inside(visibility.clean_lo, visibility.clean_hi, clean_position),
            inside(visibility.own_lo, visibility.own_hi, own_coordinate),
        ],
        axis=1,
    )
