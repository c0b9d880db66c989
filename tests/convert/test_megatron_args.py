"""Specifies convert/megatron_args.py with Megatron's own parser and checkpoint reader."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, MaskWish, ar_to_bdlm
from megatron_bp.convert.bdlm_settings import AUTOREGRESSIVE, BdlmSettings
from megatron_bp.convert.families import read_model
from megatron_bp.convert.megatron_args import checkpoint_args, megatron_flags
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from tests.convert.tiny_models import LLAMA, LLAMA3_ROPE, QWEN3, make_hf

OWN_FLAGS = ("bdlm-objective", "block-size", "mask-token-id", "clean-rule")


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    hf = make_hf(tmp_path / "hf", QWEN3)
    ar_to_bdlm(
        ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False),
        BdlmSettings("standard", 8, "token_causal", "", -1),
        MaskWish("", 100, resize=False, init="mean"),
        Silent(),
    )
    return tmp_path / "m"


def _flags(config: dict[str, Any]) -> dict[str, Any]:
    return megatron_flags(read_model(config)[1], AUTOREGRESSIVE, torch.bfloat16)


def test_flags_carry_what_use_checkpoint_args_does_not_read(converted: Path):
    lines = (converted / "megatron_flags.yaml").read_text().splitlines()
    flags = {name: json.loads(value) for name, value in (line.split(": ") for line in lines)}
    expected = {
        "qk-layernorm": True,
        "norm-epsilon": 1e-6,
        "rotary-base": 1000000,
        "kv-channels": 16,
        "untie-embeddings-and-output-weights": True,
        "make-vocab-size-divisible-by": 128,
        "padded-vocab-size": 128,
        "max-position-embeddings": 64,
        "exit-on-missing-checkpoint": True,
        "bf16": True,
        "bdlm-objective": "standard",
        "block-size": 8,
        "mask-token-id": 100,
        "clean-rule": "token_causal",
    }
    assert {name: flags.get(name) for name in expected} == expected
    scaled = _flags({**LLAMA, "rope_scaling": LLAMA3_ROPE})
    assert (scaled["use-rope-scaling"], scaled["rope-scaling-factor"]) == (True, 8.0)
    assert {"qk-layernorm", "untie-embeddings-and-output-weights"}.isdisjoint(scaled)


def test_the_shell_file_gives_an_array_with_the_checkpoint_beside_it(converted: Path):
    script = 'source "$1" && printf "%s\\n" "${MEGATRON_FLAGS[@]}"'
    command = ["bash", "-c", script, "bash", str(converted / "megatron_flags.sh")]
    words = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert words[words.index("--load") + 1] == str(converted)
    assert words[words.index("--tokenizer-model") + 1] == str(converted / "hf")
    assert words[words.index("--block-size") + 1] == "8"
    assert "--qk-layernorm" in words
    assert "True" not in words


@pytest.mark.slow
def test_megatron_parses_the_flags_and_reads_the_checkpoint_args(converted: Path):
    from megatron.training import arguments, checkpointing, global_vars

    flags = _flags(QWEN3)
    words = [
        word
        for name, value in flags.items()
        for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args([*words, "--load", str(converted)])
    shape = read_model(QWEN3)[1]
    assert (args.kv_channels, args.layernorm_epsilon, args.rotary_base) == (16, 1e-6, 1000000)
    assert (args.qk_layernorm, args.swiglu, args.padded_vocab_size) == (True, True, 128)

    bare = parser.parse_args(["--load", str(converted), "--use-checkpoint-args"])
    read, stored = checkpointing.load_args_from_checkpoint(bare)
    for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads"):
        assert getattr(read, name) == getattr(args, name) == getattr(stored, name)
    assert (read.num_query_groups, read.kv_channels, read.rotary_base) == (2, 16, 1000000)
    assert (read.untie_embeddings_and_output_weights, read.swiglu) == (True, True)
    assert (read.normalization, read.add_bias_linear) == ("RMSNorm", False)
    assert read.padded_vocab_size is None
    # What the parser makes of the flags and what the checkpoint says must agree where both speak.
    names = vars(checkpoint_args(shape, AUTOREGRESSIVE, torch.bfloat16))
    for name in (
        "group_query_attention",
        "position_embedding_type",
        "rotary_percent",
        "attention_dropout",
        "hidden_dropout",
        "layernorm_epsilon",
        "qk_layernorm",
    ):
        assert names[name] == getattr(args, name), name

    # Names must be Megatron's own, or nobody reads them; these are not made by its parser.
    derived = {
        "apply_layernorm_1p",
        "virtual_pipeline_model_parallel_size",
        "params_dtype",
        "world_size",
        "data_parallel_size",
        "consumed_train_samples",
        "consumed_valid_samples",
        "skipped_train_samples",
    }
    ours = {name.replace("-", "_") for name in OWN_FLAGS}
    assert names.keys() - vars(args).keys() == derived | ours

    global_vars.set_args(args)
    args.use_dist_ckpt = True
    checkpointing.set_checkpoint_version(3.0)
    checkpointing.check_checkpoint_args(stored)
    args.num_layers += 1
    with pytest.raises(AssertionError, match=r"num_layers value from checkpoint"):
        checkpointing.check_checkpoint_args(stored)
