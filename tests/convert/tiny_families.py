"""Tiny random repositories of every model family, made by transformers' own classes where it has
them, and the Megatron tensors they must become.

Sizes differ from one another. `expected_*` are independent oracles: they use torch.cat and views,
not the converter's row rules.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.convert.bailing_models import BAILING, bailing_shapes
from tests.convert.family_models import BUILDERS, DENSE, MOE
from tests.convert.tiny_models import write_json, write_tokenizer

Tensors = dict[str, torch.Tensor]


def transformers_repository(name: str, *, tied: bool, seed: int = 0) -> tuple[dict, Tensors]:
    """Returns (config.json, tensors) as transformers saves a random bf16 model of `BUILDERS`.

    Every stored value is random, norms and buffers too, so that no two rows agree.
    """
    torch.manual_seed(seed)
    model = BUILDERS[name](tied).to(torch.bfloat16)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors: Tensors = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            tensors |= load_file(file)
        return json.loads((Path(folder) / "config.json").read_text()), tensors


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _with_mtp_and_fp32(tensors: Tensors) -> Tensors:
    """Adds what the released Qwen3.5 files have and transformers does not write."""
    keep = re.compile(r"linear_attn\.(A_log|norm\.weight)$")
    out = {
        # Values that bf16 does not have, also near zero, where w - 1 rounds in fp32.
        name: (tensor.float() * 0.3 + 1e-3 / 3) if keep.search(name) else tensor
        for name, tensor in tensors.items()
    }
    return out | {
        "mtp.fc.weight": _random((48, 96), 1),
        "mtp.layers.0.self_attn.q_proj.weight": _random((192, 48), 2),
        "mtp.norm.weight": _random((48,), 3),
    }


def _fuse_experts(tensors: Tensors) -> Tensors:
    """Returns the tensors with each layer's experts stacked, as other repositories have them."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    layers = sorted({name.partition("experts.")[0] for name in tensors if ".experts." in name})
    for layer in layers:

        def stack(name: str, layer: str = layer) -> torch.Tensor:
            return torch.stack(
                [
                    tensors[f"{layer}experts.{number}.{name}_proj.weight"]
                    for number in range(MOE["num_experts"])
                ]
            )

        out[f"{layer}experts.gate_up_proj"] = torch.cat([stack("gate"), stack("up")], 1)
        out[f"{layer}experts.down_proj"] = stack("down")
    return out


def _to_nemotron(config: dict, tensors: Tensors) -> tuple[dict, Tensors]:
    """Returns a Ministral-3 repository under Nemotron-Labs-Diffusion's names."""
    names = {
        name: "diffusion_head.weight"
        if name == "lm_head.weight"
        else name.replace("model.", "encoder.", 1)
        for name in tensors
    }
    config = config | {
        "architectures": ["NemotronLabsDiffusionModel"],
        "model_type": "nemotron_labs_diffusion",
        "mask_token_id": 100,
        "block_size": 32,
        "dlm_paradigm": "bidirectional",
    }
    return config, {names[name]: tensor for name, tensor in tensors.items()}


def _bailing(variant: str) -> tuple[dict, Tensors]:
    config = {**BAILING, "tie_word_embeddings": variant == "tied"}
    if variant == "llada2":
        config |= {"architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe"}
    shapes = bailing_shapes(config, stacked=variant == "stacked")
    tensors = {name: _random(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    # As released: the routing bias is fp32 in a bf16 model.
    return config, {
        name: tensor.float() + 1e-3 / 3 if name.endswith("expert_bias") else tensor
        for name, tensor in tensors.items()
    }


def _drafter(second: bool) -> tuple[dict, Tensors]:
    """Returns a drafter from its published key list."""
    own: dict[str, Any] = {"mask_token_id": 100, "block_size": 8, "target_layer_ids": [1, 3, 5]}
    if second:
        own |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 12,
            "selector_top_k": 16,
        }
    config = {
        **DENSE,
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "layer_types": ["sliding_attention", "full_attention"],
        "use_sliding_window": True,
        "sliding_window": 32,
        "num_target_layers": 8,
        "block_size": 8,
        "is_causal": False,
        "dflash_config": own,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (48, 144),
        "hidden_norm.weight": (48,),
        "norm.weight": (48,),
    }
    for layer in range(2):
        prefix = f"layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (48,),
            f"{prefix}post_attention_layernorm.weight": (48,),
            f"{prefix}self_attn.q_proj.weight": (96, 48),
            f"{prefix}self_attn.k_proj.weight": (32, 48),
            f"{prefix}self_attn.v_proj.weight": (32, 48),
            f"{prefix}self_attn.o_proj.weight": (48, 96),
            f"{prefix}self_attn.q_norm.weight": (16,),
            f"{prefix}self_attn.k_norm.weight": (16,),
            f"{prefix}mlp.gate_proj.weight": (80, 48),
            f"{prefix}mlp.up_proj.weight": (80, 48),
            f"{prefix}mlp.down_proj.weight": (48, 80),
        }
        for conv in ("attention_conv", "mlp_conv") if second else ():
            shapes[f"{prefix}{conv}.base_kernel"] = (2, 2, 48)
            shapes[f"{prefix}{conv}.kernel_projection.weight"] = (2 * 2 * 3, 48)
    if second:
        shapes["candidate_selector.predecessor_codebook"] = (101, 12)
        shapes["candidate_selector.successor_codebook"] = (101, 12)
        shapes["candidate_selector.hidden_projection.weight"] = (12, 48)
    return config, {name: _random(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


def _make(name: str) -> tuple[dict, Tensors]:
    if name in ("dflash", "dflash2"):
        return _drafter(name == "dflash2")
    base, _, variant = name.partition("-")
    tied = variant == "tied"
    if base == "bailing":
        return _bailing(variant)
    if base == "nemotron":
        return _to_nemotron(*transformers_repository("ministral3", tied=tied))
    config, tensors = transformers_repository(base, tied=tied)
    if variant == "fused":
        tensors = _fuse_experts(tensors)
    if variant == "released":
        tensors = _with_mtp_and_fp32(tensors)
    if variant == "fp32":
        tensors = {key: tensor.float() + 1 / 3 for key, tensor in tensors.items()}
        config["dtype"] = "float32"
    return config, tensors


# Each family tied and untied where transformers allows both, plus what real files do differently.
CASES = (
    "llama-tied",
    "llama-fp32",
    "qwen2-tied",
    "qwen2-untied",
    "qwen2-fp32",
    "qwen3-fp32",
    "qwen3-tied",
    "qwen3_moe-untied",
    "qwen3_moe-tied",
    "qwen3_moe-fused",
    "qwen3_moe-fp32",
    "bailing-untied",
    "bailing-tied",
    "bailing-stacked",
    "bailing-llada2",
    "ministral3-tied",
    "ministral3-fp32",
    "mistral3-tied",
    "mistral3-untied",
    "nemotron-untied",
    "qwen3_5_text-tied",
    "qwen3_5_text-fp32",
    "qwen3_5-untied",
    "qwen3_5-released",
    "qwen3_5_moe-untied",
    "qwen3_5_moe-fused",
    "qwen3_5_moe-tied",
    "gemma4_text-tied",
    "gemma4_text-untied",
    "gemma4_text-fp32",
    "gemma4_with_v-tied",
    "gemma4-tied",
    "diffusion_gemma-tied",
    "dflash",
    "dflash2",
)
_MADE: dict[str, tuple[dict, Tensors]] = {}


def make_case(name: str) -> tuple[dict, Tensors]:
    """Returns (config, tensors) of a case in `CASES`; made once, so do not change them in place."""
    if name not in _MADE:
        _MADE[name] = _make(name)
    config, tensors = _MADE[name]
    return dict(config), dict(tensors)


def write_repository(
    directory: Path, config: Mapping[str, Any], tensors: Tensors, num_files: int = 1
) -> Path:
    """Writes a Hugging Face directory with weights in that many files; returns it."""
    directory.mkdir(parents=True)
    write_json(directory / "config.json", config)
    write_tokenizer(directory, 100)
    names = list(tensors)
    if num_files == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::num_files]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    write_json(directory / "model.safetensors.index.json", {"weight_map": weight_map})
    return directory
