"""Shows that Megatron loads every family it builds on a CPU, and computes transformers' logits.

Needs process groups: only real tensor, pipeline and expert ranks show how Megatron slices a
checkpoint. Gated DeltaNet and Gemma 4 have no layer that runs on a CPU (see their modules).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.families import read_model
from megatron_bp.convert.families.rope import read_rope
from megatron_bp.convert.hf_assets import read_config
from megatron_bp.convert.plan import Layout, extra_state_keys
from megatron_bp.convert.progress import Silent
from tests.convert import megatron_models as mm
from tests.convert.family_models import BUILDERS, YARN
from tests.convert.family_oracles import expected_tensors
from tests.convert.tiny_families import make_case, write_repository
from tests.convert.tiny_models import read_hf, same_bits
from tests.distributed import run_distributed

PADDED_VOCAB = 104  # 101 rows for two ranks, padded
LOADED = ("qwen2-tied", "qwen2-untied", "qwen3_moe-untied", "qwen3_moe-fused", "nemotron-untied")
LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2))  # tensor, pipeline, expert parallel
TOKENS = 33


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    return {"tie_word_embeddings": False, **config}


def _load_everywhere(rank: int, world_size: int, root: str) -> list[str]:
    wrong = []
    for tp, pp, ep in LAYOUTS:
        mm.start(tp, pp, ep)
        for name in LOADED:
            if ep > 1 and "moe" not in name:
                continue
            hf = Path(root) / "hf" / name
            config = _text_config(read_config(hf))
            full = expected_tensors(name, config, read_hf(hf))
            for layout in Layout:
                model = mm.build(config, tp, pp, torch.bfloat16, PADDED_VOCAB, ep)
                mm.load(model, Path(root) / f"{name}_{layout}" / "release")
                case = f"{name} {layout} tp{tp} pp{pp} ep{ep} "
                wrong += [case + x for x in _wrong(model, config, full, (tp, pp, ep))]
                trained = Path(root) / "trained" / f"{name}-{tp}{pp}{ep}-{layout}"
                mm.save(model, trained, homogeneous=layout is Layout.HOMOGENEOUS)
    return wrong


def _wrong(
    model: Any, config: dict[str, Any], full: dict[str, torch.Tensor], sizes: tuple[int, int, int]
) -> list[str]:
    from megatron.core import parallel_state

    tp, pp, ep = sizes
    stage = parallel_state.get_pipeline_model_parallel_rank()
    wrong = []
    for name, parameter in model.named_parameters():
        key = mm.checkpoint_name(name, stage * config["num_hidden_layers"] // pp)
        # A tied model's last pipeline stage holds its own copy of the embedding.
        whole = full[key if key in full else "embedding.word_embeddings.weight"]
        expert = mm.expert_number(name, config, ep)
        part = mm.local_slice(whole if expert < 0 else whole[expert], key, parameter.shape, tp)
        if not same_bits(parameter.data[: part.shape[0]], part):
            wrong.append(name)
    return wrong


@pytest.mark.slow
def test_megatron_loads_every_family_and_its_checkpoints_export_in_every_layout(tmp_path: Path):
    for name in LOADED:
        hf = write_repository(tmp_path / "hf" / name, *make_case(name))
        for layout in Layout:
            request = ImportRequest(hf, tmp_path / f"{name}_{layout}", layout, "keep", False)
            hf_to_mcore(request, Silent())
    assert run_distributed(_load_everywhere, 2, str(tmp_path), timeout=240) == [[], []]
    trained = sorted((tmp_path / "trained").iterdir())
    assert len(trained) == 2 * (3 * len(LOADED) + 2)
    for number, folder in enumerate(trained):
        name = folder.name.rpartition("-")[0].rpartition("-")[0]
        assets = tmp_path / f"{name}_{Layout.PER_LAYER}" / "hf"
        target = tmp_path / f"back{number}"
        # A local-spec MoE checkpoint has one of the two names of the norm, and padded tables.
        mcore_to_hf(
            ExportRequest(folder, target, assets, -1, "keep", 10**9, 0, -1, False), Silent()
        )
        before, after = read_hf(tmp_path / "hf" / name), read_hf(target)
        assert before.keys() == after.keys()
        assert [key for key in before if not same_bits(before[key], after[key])] == [], folder.name


# Tokens stay below YARN's original length: from there on llama-4 scaling, which Megatron does not
# have, changes queries.
PARITY: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-not-renormalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "ministral3-yarn": ("ministral3", {}),
    "ministral3-yarn-mscale": (
        "ministral3",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}},
    ),
}


def _tokens() -> torch.Tensor:
    return torch.randint(0, 101, (2, TOKENS), generator=torch.Generator().manual_seed(5))


def _save_transformers_model(directory: Path, name: str, changes: dict[str, Any]) -> torch.Tensor:
    """Saves a random fp32 model whose norms are not 1; returns its logits for fixed tokens."""
    torch.manual_seed(0)
    config = BUILDERS[name](changes.pop("tie_word_embeddings", False)).config
    for key, value in changes.items():
        setattr(config, key, value)
    model = type(BUILDERS[name](False))._from_config(config, attn_implementation="eager").float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in key else 0.0, 0.1)
        logits = model.eval()(_tokens()).logits
    model.save_pretrained(directory)
    return logits


def _megatron_logits(rank: int, world_size: int, root: str, configs: dict[str, Any]) -> Any:
    mm.start(1, 1)
    found = {}
    tokens = _tokens()
    positions = torch.arange(tokens.shape[1])[None].expand_as(tokens)
    causal = torch.ones(1, 1, tokens.shape[1], tokens.shape[1]).triu(1).bool()
    for name, config in configs.items():
        model = mm.build(config, 1, 1, torch.float32, 101).eval()
        asked = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        mm.load(model, Path(root) / name / "m" / "release")
        with torch.no_grad():
            logits = model(tokens, positions, causal)
        objects = [getattr(entry, "unique_key", "") for entry in asked.values()]
        found[name] = (logits, sorted(key for key in objects if key))
    return found


# Ministral-3 8B and Nemotron-Labs-Diffusion 8B.
YARN_8B = {**YARN, "original_max_position_embeddings": 16384}


def _megatron_angles(rank: int, world_size: int) -> torch.Tensor:
    mm.start(1, 1)
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
    )

    flags = dict(read_rope({"rope_parameters": YARN_8B}, []).args)
    rotary = YarnRotaryEmbedding(
        128,
        rotary_base=1000000,
        use_cpu_initialization=True,
        scaling_factor=flags["rotary_scaling_factor"],
        original_max_position_embeddings=flags["yarn_original_max_position_embeddings"],
        beta_fast=flags["yarn_beta_fast"],
        beta_slow=flags["yarn_beta_slow"],
        mscale=flags["mscale"],
        mscale_all_dim=flags["mscale_all_dim"],
        correction_range_round_to_int=flags["yarn_correction_range_round_to_int"],
    )
    angles, scale = rotary.get_emb(2)
    return angles[1, 0, 0, :64] * scale


@pytest.mark.slow
def test_yarn_of_the_8b_models_turns_by_transformers_angles():
    from transformers import Ministral3Config
    from transformers.models.ministral3.modeling_ministral3 import Ministral3RotaryEmbedding

    rotary = Ministral3RotaryEmbedding(Ministral3Config(rope_parameters=YARN_8B))
    assert rotary.attention_scaling == 1.0
    (found,) = run_distributed(_megatron_angles, 1)
    torch.testing.assert_close(found, rotary.inv_freq, rtol=1e-6, atol=0)
    plain = 1e6 ** -(torch.arange(0, 128, 2) / 128)
    assert (found / plain).min() < 0.07  # the slowest are 16 times slower
    assert torch.equal((found / plain).round(decimals=5)[:8], torch.ones(8))


@pytest.mark.slow
def test_logits_equal_those_of_transformers_in_fp32(tmp_path: Path):
    # Measured: 1.3e-6 at most.
    expected, configs = {}, {}
    for name, (builder, changes) in PARITY.items():
        expected[name] = _save_transformers_model(tmp_path / name / "hf", builder, dict(changes))
        configs[name] = _text_config(read_config(tmp_path / name / "hf"))
        request = ImportRequest(
            tmp_path / name / "hf", tmp_path / name / "m", Layout.PER_LAYER, "keep", overwrite=False
        )
        hf_to_mcore(request, Silent())
    (found,) = run_distributed(_megatron_logits, 1, str(tmp_path), configs)
    for name, config in configs.items():
        logits, objects = found[name]
        assert logits.std() > 0.1
        difference = float((logits - expected[name]).abs().max())
        assert difference <= 1e-4, (name, difference)
        # Every extra state that Megatron's local spec asks for is in what we write.
        family, shape = read_model(config)
        assert set(objects) <= set(extra_state_keys(family, shape, Layout.PER_LAYER))
        assert objects
