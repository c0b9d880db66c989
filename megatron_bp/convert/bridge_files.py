"""The files in a checkpoint that Megatron-Bridge reads: `run_config.yaml` and `train_state.pt`.

Bridge rebuilds the model from `run_config.yaml`, and its export refuses without one
(Megatron-Bridge issues 698, 1514, 1802). Written for the families whose Bridge class is the plain
GPTModelProvider, with names read in megatron-bridge 0.6.2 (models/gpt_provider.py,
training/state.py, training/checkpointing.py); Bridge itself needs CUDA and was not run on the
result. Specified by tests/convert/test_bridge_files.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
PROVIDER = "megatron.bridge.models.gpt_provider.GPTModelProvider"
# Megatron argument -> provider field, where both have it.
_FIELDS = {
    "num_layers": "num_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_query_groups",
    "kv_channels": "kv_channels",
    "max_position_embeddings": "seq_length",
    "position_embedding_type": "position_embedding_type",
    "rotary_base": "rotary_base",
    "rotary_percent": "rotary_percent",
    "rotary_interleaved": "rotary_interleaved",
    "use_rope_scaling": "rope_scaling",
    "rope_scaling_factor": "rope_scaling_factor",
    "normalization": "normalization",
    "layernorm_epsilon": "layernorm_epsilon",
    "layernorm_zero_centered_gamma": "layernorm_zero_centered_gamma",
    "qk_layernorm": "qk_layernorm",
    "swiglu": "gated_linear_unit",
    "add_bias_linear": "add_bias_linear",
    "add_qkv_bias": "add_qkv_bias",
    "attention_dropout": "attention_dropout",
    "hidden_dropout": "hidden_dropout",
    "vocab_size": "vocab_size",
    "make_vocab_size_divisible_by": "make_vocab_size_divisible_by",
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "bf16": "bf16",
    "fp16": "fp16",
    "num_experts": "num_moe_experts",
    "moe_ffn_hidden_size": "moe_ffn_hidden_size",
    "moe_router_topk": "moe_router_topk",
    "moe_router_score_function": "moe_router_score_function",
    "moe_router_load_balancing_type": "moe_router_load_balancing_type",
    "moe_aux_loss_coeff": "moe_aux_loss_coeff",
    "moe_router_pre_softmax": "moe_router_pre_softmax",
}


def write_bridge_files(directory: Path, family: str, args: argparse.Namespace) -> None:
    """Writes both files into an iteration directory, for a family in `FAMILIES`.

    No `latest_train_state.pt`: without it Bridge follows the tracker file to `release`.
    """
    if family not in FAMILIES:
        return
    config = run_config(args)
    (directory / "run_config.yaml").write_text("\n".join(_yaml(config, "")) + "\n")
    count = torch.tensor(0, dtype=torch.int64)
    state: dict[str, torch.Tensor] = {
        name: count.clone()
        for name in (
            "step",
            "consumed_train_samples",
            "skipped_train_samples",
            "consumed_valid_samples",
        )
    }
    state["floating_point_operations_so_far"] = torch.tensor(0.0, dtype=torch.float64)
    state |= {name: torch.tensor(False) for name in ("do_train", "do_valid", "do_test")}
    torch.save(state, directory / "train_state.pt")


def run_config(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the config: how to build the model, and that optimizer and RNG are not there."""
    values = vars(args)
    model: dict[str, Any] = {"_target_": PROVIDER}
    model |= {
        field: values[name] for name, field in _FIELDS.items() if values.get(name) is not None
    }
    model |= {
        "share_embeddings_and_output_weights": not values["untie_embeddings_and_output_weights"],
        "should_pad_vocab": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "params_dtype": {"_target_": str(values["params_dtype"]), "_call_": False},
        "pipeline_dtype": {"_target_": str(values["params_dtype"]), "_call_": False},
    }
    saved = {"save_optim": False, "save_rng": False, "fully_parallel_save": False}
    return {"model": model, "checkpoint": saved}


def _yaml(value: Mapping[str, Any], indent: str) -> list[str]:
    lines = []
    for name, item in value.items():
        if isinstance(item, Mapping):
            lines += [f"{indent}{name}:", *_yaml(item, indent + "  ")]
        else:
            lines.append(f"{indent}{name}: {json.dumps(item)}")
    return lines
