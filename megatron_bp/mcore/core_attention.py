"""Fills Megatron's `core_attention` slot: hands Q, K and V to block-parallel attention.

Adapters without parameters: they know Megatron's constructor and forward signatures and which
window a layer has, and nothing of how attention is computed. Specified by
tests/mcore/test_core_attention.py; the one for Transformer Engine layers is te_attention.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_bp.attention.block_parallel import AttentionOptions, block_parallel_attention
from megatron_bp.attention.keeping import Slot
from megatron_bp.layout.plan import with_window
from megatron_bp.mcore.carrier import BlockParams


@dataclass(frozen=True)
class Seat:
    """What of its layer an attention must know. `window` is in keys, 0 for none; numbers from 1."""

    window: int
    softmax_scale: float
    is_last_layer: bool
    layer_number: int

    @staticmethod
    def of(config: Any, layer_number: int, softmax_scale: float | None) -> Seat:
        """Returns the seat in a layer of Megatron's, counted from 1."""
        return Seat(
            window=layer_window(config, layer_number),
            softmax_scale=config.kv_channels**-0.5 if softmax_scale is None else softmax_scale,
            is_last_layer=layer_number == config.num_layers,
            layer_number=layer_number,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: BlockParams) -> Tensor:
        """Returns the attention of a block-diffusion batch.

        Shapes: query [T, Z, N, H], key and value [T, Z, M, H] -> [T, Z, N * H] (Z micro-batch
        size); in a pruned last layer the output has the corrupted rows only.
        """
        layout = params.layout
        corrupted_only = layout.prune and self.is_last_layer
        options = _options(layout.options, self.softmax_scale, corrupted_only)
        plan = with_window(layout.plan, self.window)
        slot = Slot(params.keeper, self.layer_number)
        output = block_parallel_attention(query, key, value, plan, layout.groups, options, slot)
        return output.reshape(*output.shape[:2], -1)


@lru_cache(maxsize=64)
def _options(
    shared: AttentionOptions, softmax_scale: float, corrupted_only: bool
) -> AttentionOptions:
    """What all layers share, with what a layer has of its own."""
    return replace(shared, softmax_scale=softmax_scale, corrupted_only=corrupted_only)


class BlockParallelAttention(MegatronModule):
    """Attention of a block-diffusion batch; a batch without our carrier goes to `stock`.

    For layers whose attention keeps no state (Megatron's own, without Transformer Engine): `stock`
    is built on its first batch only, since it refuses a context group.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        stock: Callable[..., Any],
        softmax_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(config=config)
        self.seat = Seat.of(config, layer_number, softmax_scale)
        self._build_stock = lambda: stock(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            softmax_scale=softmax_scale,
            **kwargs,
        )
        # In a tuple, and not a submodule: checkpoint keys stay those of the stock model.
        self._stock: tuple[Any, ...] = ()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Returns the attention output in Megatron's layout."""
        if isinstance(packed_seq_params, BlockParams):
            return self.seat.attend(query, key, value, packed_seq_params)
        if not self._stock:
            self._stock = (self._build_stock(),)
        return self._stock[0](
            query,
            key,
            value,
            attention_mask,
            attn_mask_type=attn_mask_type,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
        )


def layer_window(config: Any, layer_number: int) -> int:
    """Returns the window of a layer in keys, the row's own included; 0 for none.

    Megatron's window_size is (keys to the left of the row, keys to the right); -1 is unbounded.
    """
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, layer_number
    ):
        return 0
    left = int(config.window_size[0])
    return 0 if left < 0 else left + 1
