"""Specifies what each family's conversion says of the architecture, by Megatron's own parser."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.bdlm_settings import AUTOREGRESSIVE
from megatron_bp.convert.families import read_model
from megatron_bp.convert.megatron_args import checkpoint_args, megatron_flags
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from tests.convert.family_models import YARN
from tests.convert.tiny_families import make_case, write_repository

# What Megatron must be told beyond the sizes that all families have.
EXPECTED: dict[str, dict[str, Any]] = {
    "qwen2-untied": {"add_qkv_bias": True, "qk_layernorm": False, "add_bias_linear": False},
    "qwen3_moe-untied": {
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 20,
        "moe_router_pre_softmax": False,
        "moe_router_score_function": "softmax",
        "moe_aux_loss_coeff": 0.001,
        "qk_layernorm": True,
    },
    "bailing-untied": {
        "num_experts": 6,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 3,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_dtype": "fp32",
        "moe_shared_expert_intermediate_size": 20,
        "moe_layer_freq": [0, 1, 1],
        "rotary_percent": 0.5,
        "rotary_base": 600000,
        "qk_layernorm": True,
    },
    "mistral3-untied": {
        "position_embedding_type": "yarn",
        "rotary_base": 1000000,
        "rotary_scaling_factor": 16.0,
        "yarn_original_max_position_embeddings": 64,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "yarn_correction_range_round_to_int": True,
        "untie_embeddings_and_output_weights": True,
    },
    "qwen3_5-released": {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [1, 1, 1, 0],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "attention_output_gate": True,
        "rotary_percent": 0.25,
        "qk_layernorm": True,
    },
    "qwen3_5_moe-fused": {
        "moe_shared_expert_intermediate_size": 28,
        "moe_shared_expert_gate": True,
        "num_experts": 4,
    },
}


def _parse(name: str) -> argparse.Namespace:
    from megatron.training import arguments

    flags = megatron_flags(read_model(make_case(name)[0])[1], AUTOREGRESSIVE, torch.bfloat16)
    words = [
        word
        for flag, value in flags.items()
        for word in ([f"--{flag}"] if value is True else [f"--{flag}", str(value)])
    ]
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser.parse_args(words)


@pytest.mark.parametrize("name", EXPECTED)
def test_what_a_family_needs_is_in_the_args_and_the_flags(name: str):
    shape = read_model(make_case(name)[0])[1]
    stored = vars(checkpoint_args(shape, AUTOREGRESSIVE, torch.float32))
    flags = megatron_flags(shape, AUTOREGRESSIVE, torch.float32)
    for key, value in EXPECTED[name].items():
        assert stored[key] == value, key
        if key == "add_bias_linear":
            assert flags["disable-bias-linear"] is True
        elif isinstance(value, list):
            written = str(flags[key.replace("_", "-")])
            found = eval(written) if "*" in written else json.loads(written)  # ([0]*1+[1]*2)
            assert found == value
        else:
            assert flags.get(key.replace("_", "-"), False) == value, key


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXPECTED, "gemma4_text-tied", "diffusion_gemma-tied", "dflash2"])
def test_megatron_parses_the_flags_of_every_family(name: str):
    args = vars(_parse(name))
    for key, value in EXPECTED.get(name, {}).items():
        assert args[key] in (value, [value]), key  # some flags take several values
    zero_centred = "qwen3_5" in name
    assert args.get("apply_layernorm_1p", args.get("layernorm_zero_centered_gamma")) == zero_centred
    stored = vars(checkpoint_args(read_model(make_case(name)[0])[1], AUTOREGRESSIVE, torch.float32))
    assert stored["apply_layernorm_1p"] == zero_centred


@pytest.mark.slow
def test_megatron_takes_yarn_from_the_flags():
    from megatron.training.argument_utils import _apply_yarn_config_from_args

    config = SimpleNamespace()
    _apply_yarn_config_from_args(config, _parse("mistral3-untied"))
    assert vars(config) == {
        "yarn_rotary_scaling_factor": YARN["factor"],
        "yarn_original_max_position_embeddings": YARN["original_max_position_embeddings"],
        "yarn_beta_fast": YARN["beta_fast"],
        "yarn_beta_slow": YARN["beta_slow"],
        "yarn_mscale": YARN["mscale"],
        "yarn_mscale_all_dim": YARN["mscale_all_dim"],
        "yarn_correction_range_round_to_int": True,
    }


def test_what_no_flag_carries_is_noted_in_args_flags_files_and_manifest(tmp_path: Path):
    config, tensors = make_case("mistral3-untied")
    hf = write_repository(tmp_path / "hf", config, tensors)
    hf_to_mcore(ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", False), Silent())
    shape = read_model(config)[1]
    assert (
        vars(checkpoint_args(shape, AUTOREGRESSIVE, torch.float32))["llama_4_scaling_beta"] == 0.1
    )
    for file in ("megatron_flags.yaml", "megatron_flags.sh"):
        first = (tmp_path / "m" / file).read_text().splitlines()[0]
        assert first.startswith("# llama_4_scaling_beta=0.1: queries are scaled by 1 + 0.1 * log(1")
    manifest = json.loads((tmp_path / "m" / "bdlm_conversion.json").read_text())
    assert manifest["notes"] == list(shape.notes)
