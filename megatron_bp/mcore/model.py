"""Puts block diffusion into Megatron's GPTModel through its official seams.

A layer specification that is the stock one with our core attention, a rotary embedding that reads
the plan's positions, and a last layer that drops clean rows after their keys and values. No
parameter is added, renamed or moved, so checkpoints are stock. Specified by
tests/mcore/test_model.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine as extension
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec
from torch import Tensor, nn

from megatron_bp.config import BLOCK_PARALLEL
from megatron_bp.mcore.carrier import BlockParams
from megatron_bp.mcore.core_attention import BlockParallelAttention, Seat


def use_block_diffusion(config: GPTModelConfig) -> None:
    """Makes Megatron build the model of `config` for block-diffusion batches.

    A configuration that names block parallelism as its way of context parallelism keeps its own
    layer specification.
    """
    if config.transformer.cp_comm_type != BLOCK_PARALLEL:
        config.transformer_layer_spec = layer_spec
    config.pre_wrap_hooks += [require_seats, use_plan_positions]


def layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
    """Returns Megatron's own specification (local or Transformer Engine) with ours in it."""
    return diffusion_spec(default_layer_spec(config, vp_stage), config.transformer)


def diffusion_spec(spec: Any, transformer_config: Any) -> Any:
    """Returns a copy of a layer's or a block's specification with our attention in its place.

    Raises: TypeError for a layer class that is not Megatron's TransformerLayer.
    """
    if hasattr(spec, "layer_specs"):
        layers = [diffusion_spec(layer, transformer_config) for layer in spec.layer_specs]
        return replace(spec, layer_specs=layers)
    if spec.module is not TransformerLayer:
        raise TypeError(
            f"the layer specification builds {spec.module}, but block diffusion is known to fit "
            "TransformerLayer only; use a stock GPT specification (drop --spec)"
        )
    parts = spec.submodules
    attention = parts.self_attention
    core = in_the_seat_of(attention.submodules.core_attention)
    attention = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    parts = replace(
        parts,
        self_attention=attention,
        self_attn_bda=_add_to_matching_rows(parts.self_attn_bda, transformer_config),
    )
    return replace(spec, submodules=parts)


def in_the_seat_of(stock: Any) -> Callable[..., Any]:
    """Returns our core attention for a layer whose own is `stock`.

    With Transformer Engine a subclass, which shares the stock module's state; else an adapter.
    """
    if extension.HAVE_TE and stock is extension.TEDotProductAttention:
        from megatron_bp.mcore.te_attention import TEBlockParallelAttention

        return TEBlockParallelAttention
    return functools.partial(BlockParallelAttention, stock=stock)


def require_seats(models: list[Any]) -> list[Any]:
    """Returns the models if our attention is in all their layers (a pre-wrap hook).

    Raises: RuntimeError if it is not: stock attention would take our batch for a causal one.
    """
    for model in models:
        for name, module in model.named_modules():
            core = getattr(module, "core_attention", None)
            if core is not None and not isinstance(getattr(core, "seat", None), Seat):
                raise RuntimeError(
                    f"{name}.core_attention is {type(core).__name__}, which knows nothing of block "
                    f"diffusion. --cp-comm-type {BLOCK_PARALLEL} needs a patched Megatron "
                    "(tools/apply_patches.py) and a context group of at least two ranks; drop it "
                    "to use the specification of megatron_bp"
                )
    return models


class PlanRotary(nn.Module):
    """Rotary embedding at the positions of a carrier's rows; stock for any other batch.

    GPTModel asks `get_rotary_seq_len` for a length and passes it to `forward`: for our batches the
    "length" is the carrier itself, so nothing is stored between the two calls.
    """

    def __init__(self, stock: nn.Module) -> None:
        super().__init__()
        self.stock: Any = stock

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Returns the carrier, or the stock length."""
        if isinstance(packed_seq_params, BlockParams):
            return packed_seq_params
        return self.stock.get_rotary_seq_len(
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
            **kwargs,
        )

    def forward(self, carrier: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns angles [T, 1, 1, rotary size], exactly the rows of the stock table."""
        if not isinstance(carrier, BlockParams):
            return self.stock(carrier, *args, **kwargs)
        table = self.stock.get_emb(2)  # row p of the stock table is p times row 1, in fp32
        angles, *scale = table if isinstance(table, tuple) else (table,)
        position = carrier.layout.position.to(angles.dtype)[:, None, None, None]
        here = position * angles[1:2]
        return (here, *scale) if scale else here


def use_plan_positions(models: list[Any]) -> list[Any]:
    """Returns the models with their rotary embedding wrapped (a pre-wrap hook).

    Raises: ValueError for a rotary embedding that is not linear in the position.
    """
    for model in models:
        if not hasattr(model, "rotary_pos_emb"):
            continue
        if not table_is_linear(model.rotary_pos_emb):
            raise ValueError(
                f"{type(model.rotary_pos_emb).__name__} is not linear in the position, so its rows "
                "cannot be computed one by one; use --position-embedding-type rope or yarn"
            )
        model.rotary_pos_emb = PlanRotary(model.rotary_pos_emb)
    return models


def local_row_mask(ignored_T: Tensor, micro_batch_size: int, sequence_parallel: bool) -> Tensor:
    """Returns a row mask as experts take it: [Z, rows of this tensor-parallel rank]."""
    if sequence_parallel:
        ignored_T = tensor_parallel.scatter_to_sequence_parallel_region(ignored_T.contiguous())
    return ignored_T[None].expand(micro_batch_size, -1)


def _add_to_matching_rows(bias_dropout_add: Any, config: Any) -> Callable[..., Any]:
    """Wraps Megatron's bias-dropout-add so that the residual follows attention to fewer rows."""

    def build(training: bool, fused: bool) -> Callable[..., Tensor]:
        add = bias_dropout_add(training, fused)

        def add_rows(
            output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, prob: float
        ) -> Tensor:
            num_rows = output_with_bias[0].size(0)
            return add(output_with_bias, last_rows(residual, num_rows, config), prob)

        return add_rows

    return build


def last_rows(hidden: Tensor, num_rows: int, config: Any) -> Tensor:
    """Returns the last rows of a sequence, `num_rows` on each tensor-parallel rank.

    Under sequence parallelism each rank has a slice of the sequence, so the sequence is put
    together, cut and dealt again. The gradient takes the same way back.
    """
    if hidden.size(0) == num_rows:
        return hidden
    if not config.sequence_parallel:
        return hidden[-num_rows:]
    whole = tensor_parallel.gather_from_sequence_parallel_region(
        hidden, tensor_parallel_output_grad=False
    )
    total = num_rows * config.tensor_model_parallel_size
    cut: Tensor = tensor_parallel.scatter_to_sequence_parallel_region(whole[-total:].contiguous())
    return cut


def table_is_linear(rotary: Any) -> bool:
    """Returns whether row p of a rotary table is p times row 1, which `PlanRotary` relies on."""
    table = rotary.get_emb(8)
    angles = table[0] if isinstance(table, tuple) else table
    steps = torch.arange(8, dtype=angles.dtype, device=angles.device)[:, None, None, None]
    return bool(torch.equal(steps * angles[1:2], angles))
