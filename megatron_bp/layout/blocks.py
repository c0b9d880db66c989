"""Cuts a sample into blocks: where each block starts and stops and which document it is in.

Knows nothing of ranks, masks or tensors. Specified by tests/layout/test_blocks.py.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class BlockTable:
    """Blocks of one sample in position order; together they cover [0, length) exactly.

    Shapes: `start`, `stop`, `document`, `document_start` are int64 [num_blocks].
    Units: positions in tokens. `document_start` is the first position of the block's document.
    """

    length: int
    block_size: int
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    document: NDArray[np.int64]
    document_start: NDArray[np.int64]

    @property
    def num_blocks(self) -> int:
        """Number of blocks, the ragged ones included."""
        return len(self.start)

    @property
    def of_position(self) -> NDArray[np.int64]:
        """Block of each position, int64 [length]."""
        return np.repeat(np.arange(self.num_blocks), self.stop - self.start)


@lru_cache(maxsize=256)
def make_blocks(
    length: int, block_size: int, documents: Spans = (), prompts: tuple[int, ...] = ()
) -> BlockTable:
    """Blocks of `block_size` tokens, restarted at each document and after each prompt.

    `documents` are half-open spans that cover [0, length); empty means one document. `prompts`
    gives for each document the number of leading tokens that come before its first target block
    (DiffusionGemma counts blocks from the response); they are cut into blocks of their own. The
    last block of a document and of a prompt may be shorter than `block_size`.

    Raises: ValueError if lengths are not positive, or documents or prompts do not fit.
    """
    if length < 1 or block_size < 1:
        raise ValueError(
            f"length={length} and block_size={block_size} must both be at least 1; "
            "use for example length=4096, block_size=32."
        )
    spans = documents or ((0, length),)
    _check_spans(spans, length)
    offsets = prompts or (0,) * len(spans)
    if len(offsets) != len(spans):
        raise ValueError(
            f"{len(offsets)} prompts were given for {len(spans)} documents; "
            "give one prompt length a document (0 for none), or no prompts at all."
        )
    start, document, document_start = [], [], []
    for index, ((lo, hi), prompt) in enumerate(zip(spans, offsets, strict=True)):
        if not 0 <= prompt <= hi - lo:
            raise ValueError(
                f"prompt {index} has {prompt} tokens but its document has {hi - lo}; "
                f"use a value in [0, {hi - lo}]."
            )
        cuts = [*range(lo, lo + prompt, block_size), *range(lo + prompt, hi, block_size)]
        start += cuts
        document += [index] * len(cuts)
        document_start += [lo] * len(cuts)
    start_of = np.array(start, dtype=np.int64)
    return BlockTable(
        length=length,
        block_size=block_size,
        start=start_of,
        stop=np.append(start_of[1:], length),
        document=np.array(document, dtype=np.int64),
        document_start=np.array(document_start, dtype=np.int64),
    )


def _check_spans(spans: Spans, length: int) -> None:
    joined = all(a[1] == b[0] for a, b in pairwise(spans))
    if not joined or spans[0][0] != 0 or spans[-1][1] != length or any(a >= b for a, b in spans):
        raise ValueError(
            f"documents={spans} must be non-empty, adjacent and cover [0, {length}); "
            f"use for example ((0, {length}),)."
        )
