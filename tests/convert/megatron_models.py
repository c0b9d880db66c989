"""Builds Megatron GPT models for a Hugging Face config and loads converted checkpoints, on CPU.

For tests only, inside a process group. The model is built from the config directly, not from the
converter's flags, so a wrong flag does not hide a wrong tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def start(tp: int, pp: int) -> None:
    """Initialises Megatron's groups on the CPU."""
    from megatron_bp.mcore.cpu import enable_cpu

    enable_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1)


def build(config: Mapping[str, Any], tp: int, pp: int, dtype: torch.dtype, vocab: int) -> Any:
    """Returns this rank's GPTModel with `vocab` (padded) rows and all weights -1."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    heads = config["num_attention_heads"]
    qk_norm = config["model_type"] == "qwen3"
    settings = TransformerConfig(
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        num_attention_heads=heads,
        num_query_groups=config["num_key_value_heads"],
        kv_channels=config.get("head_dim", config["hidden_size"] // heads),
        ffn_hidden_size=config["intermediate_size"],
        normalization="RMSNorm",
        layernorm_epsilon=config["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        qk_layernorm=qk_norm,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )
    scaling = config.get("rope_scaling") or {}
    model = GPTModel(
        settings,
        get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm"),
        vocab_size=vocab,
        max_sequence_length=config["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=int(config["rope_theta"]),
        rope_scaling=bool(scaling),
        rope_scaling_factor=scaling.get("factor", 8.0),
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(dtype)
    for parameter in model.parameters():
        parameter.data.fill_(-1)
    return model


def load(model: Any, checkpoint: Path) -> None:
    """Loads as megatron.training does: the checkpoint's own metadata and the default strictness."""
    from megatron.core import dist_checkpointing, parallel_state

    common = dist_checkpointing.load_common_state_dict(str(checkpoint))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = dist_checkpointing.load(
        {"model": model.sharded_state_dict(metadata=metadata)}, str(checkpoint)
    )
    model.load_state_dict(state["model"], strict=True)


def local_slice(full: torch.Tensor, name: str, shape: torch.Size, tp: int) -> torch.Tensor:
    """Returns what this tensor-parallel rank holds of a full tensor, without padding rows."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    if tp == 1 or "layernorm" in name or "layer_norm" in name:
        return full
    if "linear_fc1" in name:
        return torch.cat([half.chunk(tp)[rank] for half in full.chunk(2)])
    if "linear_proj" in name or "linear_fc2" in name:
        return full.chunk(tp, 1)[rank]
    lo = rank * shape[0]
    return full[lo : lo + shape[0]]


def checkpoint_name(name: str, first_layer: int) -> str:
    """Returns the per-layer checkpoint key of a parameter of the local layer spec."""
    if ".layers." in name:
        before, _, rest = name.partition(".layers.")
        layer, _, rest = rest.partition(".")
        name = f"{before}.layers.{int(layer) + first_layer}.{rest}"
    return name.replace(
        ".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"
    ).replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
