"""Builds Megatron GPT models for a Hugging Face config and loads converted checkpoints, on CPU.

For tests only, inside a process group. The model is built from the config directly, not from the
converter's flags, so a wrong flag does not hide a wrong tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def start(tp: int, pp: int, ep: int = 1) -> None:
    """Initialises Megatron's groups on the CPU."""
    from megatron_bp.mcore.cpu import enable_cpu

    enable_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    model_parallel_cuda_manual_seed(1)


def _moe_settings(config: Mapping[str, Any], ep: int) -> dict[str, Any]:
    if "moe_intermediate_size" not in config:
        return {}
    return {
        "num_moe_experts": config.get("num_local_experts") or config["num_experts"],
        "moe_router_topk": config["num_experts_per_tok"],
        "moe_ffn_hidden_size": config["moe_intermediate_size"],
        "moe_router_pre_softmax": not config["norm_topk_prob"],
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
        "expert_model_parallel_size": ep,
    }


def _rope_settings(config: Mapping[str, Any], settings: Any) -> dict[str, Any]:
    """Returns GPTModel's arguments; YaRN's are attributes of the TransformerConfig instead."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", "default")
    if kind == "yarn":
        settings.yarn_rotary_scaling_factor = rope["factor"]
        settings.yarn_original_max_position_embeddings = rope["original_max_position_embeddings"]
        settings.yarn_beta_fast = rope["beta_fast"]
        settings.yarn_beta_slow = rope["beta_slow"]
        settings.yarn_mscale = rope["mscale"]
        settings.yarn_mscale_all_dim = rope["mscale_all_dim"]
        settings.yarn_correction_range_round_to_int = True
    return {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": int(rope.get("rope_theta") or config["rope_theta"]),
        "rope_scaling": kind == "llama3",
        "rope_scaling_factor": rope.get("factor", 8.0),
    }


def build(
    config: Mapping[str, Any], tp: int, pp: int, dtype: torch.dtype, vocab: int, ep: int = 1
) -> Any:
    """Returns this rank's GPTModel with `vocab` (padded) rows and all weights -1."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    heads = config["num_attention_heads"]
    qk_norm = config["model_type"].startswith("qwen3")
    moe = _moe_settings(config, ep)
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
        add_qkv_bias=config["model_type"] == "qwen2",
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
        **moe,
    )
    rope = _rope_settings(config, settings)
    experts = {"num_experts": moe["num_moe_experts"], "moe_grouped_gemm": False} if moe else {}
    model = GPTModel(
        settings,
        get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm", **experts),
        vocab_size=vocab,
        max_sequence_length=config["max_position_embeddings"],
        share_embeddings_and_output_weights=config["tie_word_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        **rope,
    ).to(dtype)
    for parameter in model.parameters():
        parameter.data.fill_(-1)
    return model


def save(model: Any, root: Path, *, homogeneous: bool) -> None:
    """Saves the model's weights as a training run does, under `root`/iter_0000007."""
    import argparse

    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state

    metadata: dict[str, Any] = {
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    if not homogeneous:
        metadata["non_homogeneous_layers"] = True
    state = {
        "args": argparse.Namespace(bdlm_objective="none"),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.sharded_state_dict(metadata=metadata),
    }
    folder = root / "iter_0000007"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text("7")
    dist.barrier()
    del metadata["dp_cp_group"]
    dist_checkpointing.save(state, str(folder), content_metadata=metadata)


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
    if tp == 1 or "layernorm" in name or "layer_norm" in name or "router" in name:
        return full
    if "linear_fc1" in name:
        return torch.cat([half.chunk(tp)[rank] for half in full.chunk(2)])
    if "linear_proj" in name or "linear_fc2" in name:
        return full.chunk(tp, 1)[rank]
    lo = rank * shape[0]
    return full[lo : lo + shape[0]]


def expert_number(name: str, config: Mapping[str, Any], ep: int) -> int:
    """Returns the number in the stack of the expert that a parameter belongs to, -1 for none."""
    from megatron.core import parallel_state

    match = re.search(r"\.local_experts\.(\d+)\.", name)
    if not match:
        return -1
    local = (config.get("num_local_experts") or config["num_experts"]) // ep
    return parallel_state.get_expert_model_parallel_rank() * local + int(match.group(1))


def checkpoint_name(name: str, first_layer: int) -> str:
    """Returns the per-layer checkpoint key of a parameter of the local layer spec."""
    name = re.sub(r"\.local_experts\.\d+\.", ".experts.", name)
    if ".layers." in name:
        before, _, rest = name.partition(".layers.")
        layer, _, rest = rest.partition(".")
        name = f"{before}.layers.{int(layer) + first_layer}.{rest}"
    return name.replace(
        ".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight"
    ).replace(".pre_mlp_layernorm.weight", ".mlp.linear_fc1.layer_norm_weight")
