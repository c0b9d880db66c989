"""What attention layers leave for later in the same micro-batch, and for how long.

Owns two choices: whether a layer that activation recomputation runs twice keeps its output and LSE
from the first run, and whether gathered clean keys and values wait for backward or are gathered
again. One `Keeper` belongs to one micro-batch of one model chunk, so pipeline schedules may
interleave micro-batches as they like. Knows no kernel and no wire. Specified by
tests/attention/test_keeping.py and tests/mcore/test_recompute.py.
"""

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_bp.layout.cost import LayerShape, layer_traffic
from megatron_bp.layout.plan import RankPlan


@dataclass(frozen=True)
class Keeping:
    """What waits for backward: `attention` (output and LSE of a layer that is run again), and
    `clean_kv` (the gathered keys and values; else they are gathered again)."""

    attention: bool = False
    clean_kv: bool = True


KEYS_ONLY = Keeping()  # keys wait for backward, nothing waits for a second run


class Kept(NamedTuple):
    """What the first run of a layer left. `again` says that there was one.

    `results` is (output, LSE) and `keys` the gathered key buffers, or empty if not kept.
    """

    again: bool = False
    results: tuple[Tensor, ...] = ()
    keys: tuple[Tensor, ...] = ()


class Keeper:
    """Holds what the layers of one micro-batch keep between their passes.

    A layer whose first run is without gradients puts its results here; its second run takes them,
    after which they live as long as its backward. Layers that will gather their keys again wait in
    a line, so that the backward of one can start the gather of the one below.
    """

    def __init__(self, keeping: Keeping) -> None:
        self.keeping = keeping
        self._kept: dict[int, Kept] = {}
        # Weak: a node holds its keeper, and a cycle would keep activations until collected.
        self._line: list[weakref.ref[Any]] = []

    def put(self, layer: int, results: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> None:
        """Keeps the results of a first run, as far as this keeper does."""
        if self.keeping == KEYS_ONLY:
            return
        wanted = self.keeping.attention
        self._kept[layer] = Kept(
            True, results if wanted else (), keys if wanted and self.keeping.clean_kv else ()
        )

    def take(self, layer: int) -> Kept:
        """Returns what the first run left, and forgets it."""
        return self._kept.pop(layer, Kept())

    def line_up(self, node: Any) -> None:
        """Adds a layer's autograd node that will gather its keys again."""
        self._line.append(weakref.ref(node))

    def next_after(self, node: Any) -> list[Any]:
        """Removes `node` from the line; returns the node whose backward follows, if there is one.

        Nodes whose graph is gone are skipped.
        """
        self._line = [ref for ref in self._line if ref() not in (None, node)]
        return [self._line[-1]()] if self._line else []

    @property
    def num_kept(self) -> int:
        """Layers that wait for their second run."""
        return len(self._kept)


@dataclass(frozen=True)
class Slot:
    """A layer's place in its micro-batch's keeper."""

    keeper: Keeper = field(default_factory=lambda: Keeper(KEYS_ONLY))
    layer: int = 0

    @property
    def is_first_run(self) -> bool:
        """Whether this pass computes without gradients: an evaluation, or the first of two runs."""
        return not torch.is_grad_enabled()


ALONE = Slot()  # a layer by itself


@dataclass(frozen=True)
class KeptBytes:
    """Bytes of one layer and micro-batch on one rank: `attention` and `clean_kv` if kept until
    backward, `gather` sent to gather the clean keys and values once more."""

    attention: int
    clean_kv: int
    gather: int


def kept_bytes(
    plan: RankPlan, shape: LayerShape, num_heads: int, corrupted_only: bool
) -> KeptBytes:
    """Predicts the bytes of a layer with `num_heads` query heads on this tensor-parallel rank.

    The LSE is fp32 (fp64 for fp64).
    """
    rows = plan.rows.num_corrupted if corrupted_only else plan.rows.num_rows
    width = shape.head_size * shape.bytes_per_element + max(4, shape.bytes_per_element)
    key_rows = plan.exchange.num_buffer_rows
    if plan.request.gather_corrupted:
        key_rows += len(plan.own_coordinate)
    return KeptBytes(
        attention=rows * shape.micro_batch * num_heads * width,
        clean_kv=key_rows * shape.row_elements * shape.bytes_per_element,
        gather=layer_traffic(plan, shape).gather_bytes,
    )
