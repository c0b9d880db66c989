"""Specifies convert/lora.py: what is merged is base + adapter, and PEFT's files say the same."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.link import TensorInfo
from megatron_bp.convert.lora import open_adapters
from megatron_bp.convert.torch_dist_io import COMMON_STATE, Chunk
from megatron_bp.convert.torch_dist_writer import write_torch_dist
from tests.convert.tiny_models import LLAMA, QWEN3, expected_megatron, make_hf, read_hf

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
convert_checkpoint = importlib.import_module("convert_checkpoint")

RANK, ALPHA = 3, 6.0
LINEARS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def make_adapters(
    folder: Path, config: dict[str, Any], megatron: dict[str, torch.Tensor], stacked: bool
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Writes a checkpoint as a run with adapters leaves it; returns A and B by weight key."""
    generator = torch.Generator().manual_seed(9)
    factors, tensors = {}, {}
    for layer in range(config["num_hidden_layers"]):
        for linear in LINEARS:
            key = f"decoder.layers.{layer}.{linear}"
            rows, columns = megatron[f"{key}.weight"].shape
            a = torch.randn(RANK, columns, generator=generator).bfloat16()
            b = torch.randn(rows, RANK, generator=generator).bfloat16()
            factors[f"{key}.weight"] = (a, b)
            tensors |= {f"{key}.lora_a": a, f"{key}.lora_b": b}
    if stacked:
        numbers = range(config["num_hidden_layers"])
        tensors = {
            f"decoder.layers.{linear}.{factor}": torch.stack(
                [tensors[f"decoder.layers.{number}.{linear}.{factor}"] for number in numbers]
            )
            for linear in LINEARS
            for factor in ("lora_a", "lora_b")
        }
    args = argparse.Namespace(
        bdlm_lora_rank=RANK,
        bdlm_lora_alpha=ALPHA,
        bdlm_objective="standard",
        block_size=8,
        mask_token_id=4,
        clean_rule="block_causal",
    )
    common = {"args": args, "iteration": 7, "checkpoint_version": 3.0}
    chunks = [
        Chunk(key, TensorInfo(tuple(value.shape), value.dtype), (0,) * value.dim(), value.shape)
        for key, value in tensors.items()
    ]
    write_torch_dist(
        folder / "iter_0000007",
        chunks,
        {COMMON_STATE: common},
        lambda chunk: tensors[chunk.key],
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return factors


def run(*words: Any) -> int:
    return convert_checkpoint.main([str(word) for word in words])


@pytest.fixture(params=["per_layer-stacked", "homogeneous-apart"])
def case(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """A base in one layout, adapters in the other; the last fixture's value names both."""
    layout, _, kind = request.param.partition("-")
    config = QWEN3 if layout == "per_layer" else LLAMA
    hf = make_hf(tmp_path / "hf", config)
    assert run("hf2mcore", hf, tmp_path / "base", "--layout", layout) == 0
    megatron = expected_megatron(config, read_hf(hf))
    factors = make_adapters(tmp_path / "adapters", config, megatron, kind == "stacked")
    return {"config": config, "folder": tmp_path, "megatron": megatron, "factors": factors}


def merged_by_hand(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """W + alpha / rank * B A in float64, as Hugging Face has the tensors."""
    whole = {key: value.double() for key, value in case["megatron"].items()}
    for key, (a, b) in case["factors"].items():
        whole[key] = whole[key] + ALPHA / RANK * (b.double() @ a.double())
    config, found = case["config"], {}
    groups = config["num_key_value_heads"]
    head = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    queries = config["num_attention_heads"] // groups * head
    for layer in range(config["num_hidden_layers"]):
        m, h = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        qkv = whole[f"{m}self_attention.linear_qkv.weight"].unflatten(0, (groups, -1))
        parts = qkv.split([queries, head, head], 1)
        for name, part in zip("qkv", parts, strict=True):
            found[f"{h}self_attn.{name}_proj.weight"] = part.flatten(0, 1)
        found[f"{h}self_attn.o_proj.weight"] = whole[f"{m}self_attention.linear_proj.weight"]
        gate, up = whole[f"{m}mlp.linear_fc1.weight"].chunk(2)
        found |= {f"{h}mlp.gate_proj.weight": gate, f"{h}mlp.up_proj.weight": up}
        found[f"{h}mlp.down_proj.weight"] = whole[f"{m}mlp.linear_fc2.weight"]
    return found


def test_the_merged_export_is_base_plus_adapter_rounded_once(case: dict[str, Any]) -> None:
    folder = case["folder"]
    base, target = folder / "base", folder / "merged"
    assert run("mcore2hf", base, target, "--lora", folder / "adapters") == 0
    before, after = read_hf(folder / "hf"), read_hf(target)
    wanted = merged_by_hand(case)
    assert before.keys() == after.keys()
    for name, value in after.items():
        if name not in wanted:
            assert torch.equal(value, before[name]), name
            continue
        exact = wanted[name]
        assert not torch.equal(value, before[name])
        # half a unit in the last place of bf16, and the fp32 sum's own rounding
        assert ((value.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-6).all(), name
    kept = json.loads((target / "config.json").read_text())
    assert (kept["block_size"], kept["mask_token_id"]) == (8, 4)  # of the adapters' run


def test_a_float32_export_keeps_what_bf16_would_round(case: dict[str, Any]) -> None:
    folder = case["folder"]
    words = ("--lora", folder / "adapters", "--dtype", "float32")
    assert run("mcore2hf", folder / "base", folder / "merged", *words) == 0
    after = read_hf(folder / "merged")
    for name, exact in merged_by_hand(case).items():
        torch.testing.assert_close(after[name].double(), exact, rtol=1e-5, atol=1e-5)


def test_peft_files_hold_the_same_product(case: dict[str, Any]) -> None:
    folder = case["folder"]
    words = ("--hf-assets", folder / "base" / "hf")
    assert run("lora2peft", folder / "adapters", folder / "peft", *words) == 0
    config = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    modules = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
    assert config["target_modules"] == modules.split()
    before, tensors = read_hf(folder / "hf"), read_hf(folder / "peft")
    wanted = merged_by_hand(case)
    assert len(tensors) == 2 * len(wanted)
    for name, exact in wanted.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        product = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        whole = before[name].double() + config["lora_alpha"] / config["r"] * product.double()
        torch.testing.assert_close(whole, exact, rtol=1e-5, atol=1e-5)
    assert run("lora2peft", folder / "adapters", folder / "peft", *words) == 1


def test_adapters_of_another_model_are_refused(
    case: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = case["folder"]
    other = {**case["config"], "intermediate_size": 2 * case["config"]["intermediate_size"]}
    make_hf(folder / "other", other)
    assert run("hf2mcore", folder / "other", folder / "base2") == 0
    words = ("--lora", folder / "adapters")
    assert run("mcore2hf", folder / "base2", folder / "merged", *words) == 1
    assert "mlp.linear_fc1 is for a weight" in capsys.readouterr().err
    assert run("mcore2hf", folder / "base", folder / "merged", "--lora", folder / "base") == 1
    assert "holds no adapters; give the --save folder of a run" in capsys.readouterr().err


def test_the_run_s_rank_and_alpha_are_read(case: dict[str, Any]) -> None:
    adapters = open_adapters(case["folder"] / "adapters")
    assert (adapters.rank, adapters.alpha, adapters.iteration) == (RANK, ALPHA, 7)
