"""Fills the core-attention seat of Megatron's Transformer Engine layers.

A subclass, so that it is a stock attention in everything but a block-diffusion batch: the same
state (`_extra_state`) under the same keys, the same kernels for a batch without our carrier.
Block-diffusion attention computes in the dtype of Q, K and V, also where an fp8 recipe is on for
the linear layers. Importing this file needs Transformer Engine. Specified by
tests/mcore/test_te_attention.py and, on a GPU, tests/mcore/test_gpu_te.py.
"""

from __future__ import annotations

from typing import Any

from megatron.core.extensions import transformer_engine as extension
from torch import Tensor

from megatron_bp.config import BLOCK_PARALLEL
from megatron_bp.mcore.carrier import BlockParams
from megatron_bp.mcore.core_attention import Seat

if not extension.HAVE_TE:
    raise ImportError(
        "TEBlockParallelAttention needs Transformer Engine, which does not import here: pip "
        "install 'megatron-bp[te]', or use --transformer-impl local."
    )


class TEBlockParallelAttention(extension.TEDotProductAttention):
    """Attention of a block-diffusion batch; any other batch takes Transformer Engine's path.

    Shapes: as `Seat.attend`.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        *,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = "p2p",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            config,
            layer_number,
            attn_mask_type,
            attention_type,
            softmax_scale=softmax_scale,
            # Batches without a plan still need one of Transformer Engine's ways.
            cp_comm_type="p2p" if cp_comm_type == BLOCK_PARALLEL else cp_comm_type,
            **kwargs,
        )
        self.seat = Seat.of(config, layer_number, softmax_scale)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        num_splits: int | None = None,
    ) -> Tensor:
        """Returns the attention output in Megatron's layout."""
        if isinstance(packed_seq_params, BlockParams):
            return self.seat.attend(query, key, value, packed_seq_params)
        stock: Tensor = super().forward(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
            num_splits=num_splits,
        )
        return stock
