"""Builds Megatron's Qwen3.5 model on the CPU, for tests only.

megatron-core's GatedDeltaNet and gated SelfAttention are used as they are, with the parameter names
of the Transformer Engine layer spec. Replaced are three things that need CUDA: the column-parallel
linear with a fused norm and the norm (plain torch, zero-centred), and flash-linear-attention's
l2norm; `deterministic_mode` selects Megatron's own torch version of the gated delta rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def _zero_centred_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), 1 + weight, eps)


class ZeroCentredNorm(torch.nn.Module):
    """RMSNorm with weight 1 + w; takes the arguments of Megatron's norms."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises the last dim."""
        return _zero_centred_norm(x, self.weight, self.eps)


def use_torch_gated_delta_net() -> None:
    """Makes megatron-core's GatedDeltaNet importable and runnable without CUDA kernels."""
    from megatron.core.ssm.gated_delta_net import common

    def l2norm(x: torch.Tensor, dim: int = -1, eps: float = 1e-6) -> torch.Tensor:
        return x * torch.rsqrt((x * x).sum(dim=dim, keepdim=True) + eps)

    common.HAVE_FLA = True
    common.l2norm = l2norm


def _block_spec(layer_types: list[str], num_experts: int) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    class NormedColumn(ColumnParallelLinear):
        """A column-parallel linear with a norm before it, as Transformer Engine has."""

        def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any):
            super().__init__(input_size, output_size, config=config, **kwargs)
            self.eps = config.layernorm_epsilon
            self.layer_norm_weight = torch.nn.Parameter(torch.zeros(input_size))

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            normed = _zero_centred_norm(x, self.layer_norm_weight, self.eps)
            return super().forward(normed, *args, **kwargs)

    gated = ModuleSpec(
        GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=NormedColumn, out_norm=ZeroCentredNorm, out_proj=RowParallelLinear
        ),
    )
    full = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormedColumn,
            core_attention=DotProductAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=ZeroCentredNorm,
            k_layernorm=ZeroCentredNorm,
        ),
    )
    mlp = ModuleSpec(
        MLP, submodules=MLPSubmodules(linear_fc1=NormedColumn, linear_fc2=RowParallelLinear)
    )
    pre_mlp_norm: Any = IdentityOp
    if num_experts:
        mlp = get_moe_module_spec(use_te=False, num_experts=num_experts, moe_grouped_gemm=False)
        pre_mlp_norm = ZeroCentredNorm
    layers = [
        ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=IdentityOp,
                self_attention=gated if kind == "linear_attention" else full,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=pre_mlp_norm,
                mlp=mlp,
                mlp_bda=get_bias_dropout_add,
            ),
        )
        for kind in layer_types
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=ZeroCentredNorm)


def build_hybrid(config: Mapping[str, Any], tp: int, dtype: torch.dtype, vocab: int) -> Any:
    """Returns this rank's GPTModel for a Qwen3.5 text config, all weights -1."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

    use_torch_gated_delta_net()
    rope = config["rope_parameters"]
    num_experts = config.get("num_local_experts") or config.get("num_experts", 0)
    moe: dict[str, Any] = {}
    if num_experts:
        moe = {
            "num_moe_experts": num_experts,
            "moe_router_topk": config["num_experts_per_tok"],
            "moe_ffn_hidden_size": config["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": config["shared_expert_intermediate_size"],
            "moe_shared_expert_gate": True,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
        }
    settings = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=config["num_attention_heads"],
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config["head_dim"],
        ffn_hidden_size=config.get("intermediate_size", 64),
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        layernorm_zero_centered_gamma=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(kind != "full_attention") for kind in config["layer_types"]],
        linear_num_key_heads=config["linear_num_key_heads"],
        linear_num_value_heads=config["linear_num_value_heads"],
        linear_key_head_dim=config["linear_key_head_dim"],
        linear_value_head_dim=config["linear_value_head_dim"],
        linear_conv_kernel_dim=config["linear_conv_kernel_dim"],
        deterministic_mode=True,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=tp,
        **moe,
    )
    model = GPTModel(
        settings,
        _block_spec(config["layer_types"], num_experts),
        vocab_size=vocab,
        max_sequence_length=config["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(rope["rope_theta"]),
        rotary_percent=rope["partial_rotary_factor"],
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
    ).to(dtype)
    for parameter in model.parameters():
        parameter.data.fill_(-1)
    return model
