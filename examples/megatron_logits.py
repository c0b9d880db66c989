#!/usr/bin/env python3
"""Compares Megatron-Core's logits of a training checkpoint with transformers' of its exports.

    megatron_logits.py RUN HF_DIR [HF_DIR...] --text module.py

The Megatron model is built from the arguments that the checkpoint itself stores, with the local
layer specification, and loaded by Megatron's own reader; the exports by AutoModelForCausalLM. Both
in fp32 on the CPU with the ordinary causal mask, on tokens of the text with some replaced by the
mask token. Fails above 1e-4. For dense models with rotary positions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_bp.convert.megatron_model import LATEST, find_iteration

LIMIT = 1e-4


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="--save folder of a training run")
    parser.add_argument("exports", type=Path, nargs="+", help="outputs of mcore2hf")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--length", type=int, default=128, help="tokens")
    return parser.parse_args(arguments)


def build(args: argparse.Namespace, rows: int) -> Any:
    """Returns Megatron's GPTModel as the checkpoint's arguments describe it, weights unset."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        kv_channels=args.kv_channels,
        ffn_hidden_size=args.ffn_hidden_size,
        normalization=args.normalization,
        layernorm_epsilon=args.layernorm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization),
        vocab_size=rows,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
    )


def load(directory: Path) -> Any:
    """Returns the model of a checkpoint in fp32, loaded as megatron.training loads it."""
    from megatron_bp.mcore.cpu import enable_cpu

    enable_cpu()
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("gloo", init_method=f"file://{file.name}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    common = dist_checkpointing.load_common_state_dict(str(directory))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    model = build(common["args"], common["args"].padded_vocab_size).float().eval()
    state = dist_checkpointing.load(
        {"model": model.sharded_state_dict(metadata=metadata)}, str(directory)
    )
    model.load_state_dict(state["model"], strict=True)
    return model


def main(arguments: list[str]) -> int:
    """Prints the largest difference for every export; returns the exit status."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    args = parse(arguments)
    tokenizer = AutoTokenizer.from_pretrained(args.exports[0])
    text = args.text.read_text(encoding="utf-8")
    ids = tokenizer(text, add_special_tokens=False).input_ids[: args.length]
    tokens = torch.tensor([ids])
    mask = AutoConfig.from_pretrained(args.exports[0], trust_remote_code=True).mask_token_id
    tokens[0, ::3] = mask
    positions = torch.arange(len(ids))[None]
    hidden = torch.ones(1, 1, len(ids), len(ids)).triu(1).bool()
    model = load(find_iteration(args.run, LATEST))
    worst = 0.0
    with torch.no_grad():
        ours = model(tokens, positions, hidden)
        for folder in args.exports:
            served = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, trust_remote_code=True
            ).eval()
            theirs = served(tokens).logits
            difference = float((ours[..., : theirs.shape[-1]] - theirs).abs().max())
            worst = max(worst, difference)
            name = type(served).__name__
            print(f"{name}: largest difference {difference:.2g}, logits {float(theirs.std()):.2f}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
