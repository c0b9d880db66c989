"""The Megatron arguments of a model shape: checkpoint Namespace, common state and flags files.

`--use-checkpoint-args` reads only part of the architecture (not qk_layernorm, the norm epsilon or
rope scaling), so the flags files carry all of it. Knows argument names of megatron-core 0.19;
imports none. Specified by tests/convert/test_megatron_args.py.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_bp.convert.bdlm_settings import BdlmSettings
from megatron_bp.convert.families.base import ModelShape
from megatron_bp.convert.plan import Layout

VOCAB_MULTIPLE = 128
ASSETS_NAME = "hf"
RELEASE_NAME = "release"
TRACKER_NAME = "latest_checkpointed_iteration.txt"
Flags = dict[str, str | int | float | bool]


def common_state(
    shape: ModelShape, bdlm: BdlmSettings, layout: Layout, dtype: torch.dtype
) -> dict[str, Any]:
    """Returns what Megatron reads before the tensors: args, iteration and content metadata."""
    content: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if layout is Layout.PER_LAYER:
        content["non_homogeneous_layers"] = True
    return {
        "args": checkpoint_args(shape, bdlm, dtype),
        "iteration": 0,
        "checkpoint_version": 3.0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": content,
    }


def checkpoint_args(
    shape: ModelShape, bdlm: BdlmSettings, dtype: torch.dtype
) -> argparse.Namespace:
    """Returns the Namespace that load_args_from_checkpoint and check_checkpoint_args read.

    Plain types only: the loader refuses others. `padded_vocab_size` and `seq_length` stay out,
    because they belong to the run (tensor parallel size, data) and would silently override it.
    """
    return argparse.Namespace(
        **{**_architecture(shape), **_absent_features(), **dict(shape.args)},
        bdlm_objective=bdlm.objective,
        block_size=bdlm.block_size,
        mask_token_id=bdlm.mask_token_id,
        clean_rule=bdlm.clean_rule,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        ckpt_format="torch_dist",
        tokenizer_type="HuggingFaceTokenizer",
        tokenizer_model=None,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        expert_model_parallel_size=1,
        world_size=1,
        data_parallel_size=1,
        data_parallel_random_init=False,
        consumed_train_samples=0,
        consumed_valid_samples=0,
        skipped_train_samples=0,
        no_save_optim=True,
        no_save_rng=True,
    )


def _architecture(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "group_query_attention": True,
        "num_query_groups": shape.num_groups,
        "kv_channels": shape.head_size,
        "max_position_embeddings": shape.max_positions,
        "position_embedding_type": "rope",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_base": shape.rope_base,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": shape.rope_scaling_factor > 0,
        "rope_scaling_factor": shape.rope_scaling_factor or 8.0,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_epsilon,
        "apply_layernorm_1p": False,
        "layernorm_zero_centered_gamma": False,
        "qk_layernorm": shape.qk_norm,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "untie_embeddings_and_output_weights": not shape.tied,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "apply_query_key_layer_scaling": False,
        "vocab_size": shape.vocab_size,
        "make_vocab_size_divisible_by": VOCAB_MULTIPLE,
    }


def _absent_features() -> dict[str, Any]:
    """Returns fields that loaders read and that say "not used" for a dense model."""
    return {
        "spec": None,
        "num_experts": None,
        "moe_layer_freq": 1,
        "mtp_num_layers": None,
        "multi_latent_attention": False,
        "hybrid_layer_pattern": None,
        "is_hybrid_model": False,
        "heterogeneous_layers_config_path": None,
        "heterogeneous_layers_config_encoded_json": None,
        "no_persist_layer_norm": False,
        "overlap_p2p_comm": False,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "fp8_param_gather": False,
        "bias_swiglu_fusion": True,
        "init_method_xavier_uniform": False,
        "config_logger_dir": "",
        "cp_comm_type": ["p2p"],
    }


def megatron_flags(shape: ModelShape, bdlm: BdlmSettings, dtype: torch.dtype) -> Flags:
    """Returns the flags, without dashes, that build this model and load the checkpoint.

    `padded-vocab-size` is fixed because Megatron would otherwise pad the tokenizer's size, which
    may be smaller than the table.
    """
    padded = -(-shape.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    flags: Flags = {
        "num-layers": shape.num_layers,
        "hidden-size": shape.hidden_size,
        "ffn-hidden-size": shape.ffn_size,
        "num-attention-heads": shape.num_heads,
        "group-query-attention": True,
        "num-query-groups": shape.num_groups,
        "kv-channels": shape.head_size,
        "max-position-embeddings": shape.max_positions,
        "position-embedding-type": "rope",
        "rotary-base": shape.rope_base,
        "rotary-percent": 1.0,
        "normalization": "RMSNorm",
        "norm-epsilon": shape.norm_epsilon,
        "swiglu": True,
        "disable-bias-linear": True,
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "make-vocab-size-divisible-by": VOCAB_MULTIPLE,
        "padded-vocab-size": padded,
    }
    if shape.rope_scaling_factor:
        flags |= {"use-rope-scaling": True, "rope-scaling-factor": shape.rope_scaling_factor}
    if shape.qk_norm:
        flags["qk-layernorm"] = True
    if not shape.tied:
        flags["untie-embeddings-and-output-weights"] = True
    flags = {
        name: value for name, value in (flags | dict(shape.flags)).items() if value is not False
    }
    if dtype != torch.float32:
        flags["bf16" if dtype == torch.bfloat16 else "fp16"] = True
    flags |= {"ckpt-format": "torch_dist", "finetune": True, "exit-on-missing-checkpoint": True}
    if bdlm.objective != "none":
        flags |= {
            "bdlm-objective": bdlm.objective,
            "block-size": bdlm.block_size,
            "mask-token-id": bdlm.mask_token_id,
            "clean-rule": bdlm.clean_rule,
        }
    return flags


def write_flags(
    directory: Path, flags: Mapping[str, str | int | float | bool], notes: Sequence[str] = ()
) -> None:
    """Writes `megatron_flags.yaml` and `megatron_flags.sh` (source it: array MEGATRON_FLAGS).

    `notes` become comments: what the model needs and no flag can say.
    """
    comments = [f"# {note}" for note in notes]
    yaml = comments + [f"{name}: {json.dumps(value)}" for name, value in flags.items()]
    (directory / "megatron_flags.yaml").write_text("\n".join(yaml) + "\n")
    words = []
    for name, value in flags.items():
        words.append(f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}")
    shell = [
        *comments,
        'converted="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
        "MEGATRON_FLAGS=(",
        *(f"  {word}" for word in words),
        '  --load "$converted"',
        f'  --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$converted/{ASSETS_NAME}"',
        ")",
    ]
    (directory / "megatron_flags.sh").write_text("\n".join(shell) + "\n")
