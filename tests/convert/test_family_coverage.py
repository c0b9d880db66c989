"""Specifies that every family accounts for every tensor on both sides, and names what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.check import inspect_directory, verify
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.families import FAMILIES, read_model
from megatron_bp.convert.link import Link, TensorInfo
from megatron_bp.convert.megatron_model import open_megatron_model
from megatron_bp.convert.plan import (
    Layout,
    check_coverage,
    extra_state_keys,
    hf_shapes,
    make_links,
    megatron_shapes,
)
from megatron_bp.convert.progress import Silent
from megatron_bp.convert.torch_dist_io import COMMON_STATE, Chunk, TorchDistReader
from megatron_bp.convert.torch_dist_writer import write_torch_dist
from tests.convert.tiny_families import CASES, make_case, write_repository
from tests.convert.tiny_models import read_hf, same_bits

GOLDEN = Path(__file__).parents[1] / "golden"
# One case a key layout: what the golden lists hold.
GOLDEN_CASES = (
    "qwen2-untied",
    "qwen3_moe-untied",
    "bailing-untied",
    "mistral3-untied",
    "nemotron-untied",
    "qwen3_5-released",
    "qwen3_5_moe-fused",
    "gemma4_text-tied",
    "gemma4-tied",
    "diffusion_gemma-tied",
    "dflash",
    "dflash2",
)


def _links(name: str) -> tuple[tuple[Link, ...], Any, dict[str, torch.Tensor]]:
    config, tensors = make_case(name)
    family, shape = read_model(config)
    shape = family.adapt(shape, tensors)
    owned = {
        key: tensor
        for key, tensor in tensors.items()
        if not (family.pass_through and key.startswith(family.pass_through))
    }
    return make_links(family, shape), (family, shape), owned


def test_every_family_has_a_case():
    covered = {read_model(make_case(name)[0])[0].name for name in CASES}
    assert covered == {family.name for family in FAMILIES}


@pytest.mark.parametrize("name", CASES)
def test_links_read_exactly_the_text_models_tensors(name: str):
    # check_links (inside make_links) has shown that every row of them is used exactly once.
    links, _, owned = _links(name)
    assert hf_shapes(links) == {key: tuple(tensor.shape) for key, tensor in owned.items()}


@pytest.mark.parametrize("name", GOLDEN_CASES)
def test_checkpoint_keys_match_the_golden_list(name: str):
    # Where the names come from is in each family's module; test_family_megatron.py checks those
    # that Megatron can build.
    links, (family, shape), _ = _links(name)
    found = {}
    for layout in Layout if family.stackable else (Layout.PER_LAYER,):
        tensors = megatron_shapes(links, layout, shape.num_layers)
        found[str(layout)] = {
            "tensors": {key: list(size) for key, size in sorted(tensors.items())},
            "objects": sorted(extra_state_keys(family, shape, layout)),
        }
    golden = json.loads((GOLDEN / f"convert_{name.partition('-')[0]}_keys.json").read_text())
    assert found == golden


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_that_is_missing_renamed_or_misshapen_is_named(name: str):
    links, (_, shape), owned = _links(name)
    sides = {
        "source": hf_shapes(links),
        "checkpoint": megatron_shapes(links, Layout.PER_LAYER, shape.num_layers),
    }
    assert sides["source"].keys() == owned.keys()
    for expected in sides.values():
        whole = {key: TensorInfo(size, torch.bfloat16) for key, size in expected.items()}
        check_coverage("here", expected, whole)
        for key, info in whole.items():
            without = {k: v for k, v in whole.items() if k != key}
            larger = TensorInfo((*info.shape[:-1], info.shape[-1] + 1), info.dtype)
            for wrong, texts in (
                (without, [f"1 missing: {key}"]),
                ({**without, f"{key}_": info}, [f"1 missing: {key}", f"accounted for: {key}_"]),
                ({**whole, f"{key}_": info}, [f"1 not accounted for: {key}_"]),
                ({**whole, key: larger}, [f"1 of another shape: {key} has "]),
            ):
                with pytest.raises(ValueError, match="here does not have") as error:
                    check_coverage("here", expected, wrong)
                assert all(text in str(error.value) for text in texts), (key, str(error.value))


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("qwen2-tied", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3_moe-untied", "model.layers.1.mlp.experts.2.up_proj.weight"),
        ("qwen3_moe-fused", "model.layers.0.mlp.experts.down_proj"),
        ("bailing-untied", "model.layers.2.mlp.gate.expert_bias"),
        ("mistral3-untied", "language_model.lm_head.weight"),
        ("nemotron-untied", "diffusion_head.weight"),
        ("qwen3_5-released", "model.language_model.layers.0.linear_attn.A_log"),
        ("qwen3_5_moe-fused", "model.layers.2.mlp.shared_expert_gate.weight"),
        ("gemma4_text-tied", "model.layers.0.layer_scalar"),
        ("diffusion_gemma-tied", "model.encoder.language_model.layers.1.layer_scalar"),
        ("dflash2", "candidate_selector.predecessor_codebook"),
    ],
)
def test_a_renamed_tensor_stops_the_conversion_before_anything_is_written(
    tmp_path: Path, name: str, renamed: str
):
    config, tensors = make_case(name)
    tensors[f"{renamed}.other"] = tensors.pop(renamed)
    hf = write_repository(tmp_path / "hf", config, tensors)
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False)
    with pytest.raises(ValueError, match=r"1 missing(?s:.*)1 not accounted for") as error:
        hf_to_mcore(request, Silent())
    assert f"missing: {renamed}\n" in str(error.value)
    assert f"accounted for: {renamed}.other" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_tied_head_that_differs_is_refused_in_a_vision_repository(tmp_path: Path):
    config, tensors = make_case("mistral3-tied")
    head = {
        "language_model.lm_head.weight": tensors["language_model.model.embed_tokens.weight"] + 1
    }
    hf = write_repository(tmp_path / "hf", config, tensors | head)
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False)
    with pytest.raises(ValueError, match=r"language_model\.lm_head\.weight differs"):
        hf_to_mcore(request, Silent())


def test_a_tied_head_that_a_repository_repeats_is_repeated_by_the_export(tmp_path: Path):
    config, tensors = make_case("mistral3-tied")
    head = "language_model.lm_head.weight"
    tensors[head] = tensors["language_model.model.embed_tokens.weight"].clone()
    hf = write_repository(tmp_path / "hf", config, tensors)
    m = tmp_path / "m"
    hf_to_mcore(ImportRequest(hf, m, Layout.PER_LAYER, "keep", overwrite=False), Silent())
    assert "output_layer.weight" not in TorchDistReader(m / "release").tensors
    request = ExportRequest(m, tmp_path / "b", m / "hf", -1, "keep", 10**9, 0, -1, overwrite=False)
    mcore_to_hf(request, Silent())
    after = read_hf(tmp_path / "b")
    assert after.keys() == tensors.keys()
    assert same_bits(after[head], tensors[head])


@pytest.mark.parametrize("name", ["qwen3_5-released", "diffusion_gemma-tied", "dflash2"])
def test_inspect_and_verify_understand_every_kind_of_family(tmp_path: Path, name: str):
    config, tensors = make_case(name)
    hf, m = write_repository(tmp_path / "hf", config, tensors), tmp_path / "m"
    hf_to_mcore(ImportRequest(hf, m, Layout.PER_LAYER, "keep", overwrite=False), Silent())
    seen = json.loads(json.dumps(inspect_directory(hf)))
    assert (seen["family"], seen["num_tensors"]) == (name.partition("-")[0], len(tensors))
    result = verify(hf, m, Silent())
    assert (result["differ"], result["exempt_rows"]) == ([], 0)
    assert result["tensors"] >= len(tensors)
    changed = next(key for key in tensors if key.endswith("norm.weight"))
    other = write_repository(tmp_path / "x", config, tensors | {changed: tensors[changed] + 1})
    assert verify(other, m, Silent())["differ"] == [changed]


# Published counts of parameters (model cards), tied tables counted once.
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "SmolLM2-135M": (
        134_515_008,
        {
            "model_type": "llama",
            "num_hidden_layers": 30,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen2.5-7B": (
        7_615_616_512,
        {
            "model_type": "qwen2",
            "num_hidden_layers": 28,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 152064,
        },
    ),
    "Qwen3-8B": (
        8_190_735_360,
        {
            "model_type": "qwen3",
            "num_hidden_layers": 36,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "model_type": "qwen3_moe",
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_give_the_published_number_of_parameters(name: str):
    count, config = PUBLISHED[name]
    links = make_links(*read_model({"max_position_embeddings": 4096, **config}))
    assert sum(math.prod(shape) for shape in hf_shapes(links).values()) == count


@pytest.mark.parametrize("layout", list(Layout))
def test_a_norm_that_differs_under_its_two_names_is_refused(tmp_path: Path, layout: Layout):
    config, tensors = make_case("qwen3_moe-untied")
    hf, m = write_repository(tmp_path / "hf", config, tensors), tmp_path / "m"
    hf_to_mcore(ImportRequest(hf, m, layout, "keep", overwrite=False), Silent())
    reader = TorchDistReader(m / "release")
    chunks, values = [], {}
    for key, info in reader.tensors.items():
        chunk = Chunk(key, info, (0,) * len(info.shape), info.shape)
        chunks.append(chunk)
        values[key] = torch.cat([rows for _, rows in reader.iter_rows(key)])
    changed = next(key for key in values if key.endswith("pre_mlp_layernorm.weight"))
    values[changed] = values[changed] + 1
    objects = {COMMON_STATE: reader.common_state()}
    write_torch_dist(tmp_path / "x", chunks, objects, lambda chunk: values[chunk.key])
    with pytest.raises(ValueError, match="are one tensor under two names, but differ") as error:
        open_megatron_model(tmp_path / "x", config)
    assert changed in str(error.value)


@pytest.mark.parametrize("name", ["qwen2-tied", "qwen3_5-released", "gemma4-tied"])
def test_mixed_dtypes_inside_one_megatron_tensor_are_refused(tmp_path: Path, name: str):
    config, tensors = make_case(name)
    key = next(key for key in tensors if key.endswith("k_proj.weight"))
    tensors[key] = tensors[key].float()
    hf = write_repository(tmp_path / "hf", config, tensors)
    with pytest.raises(ValueError, match="must be one float") as error:
        hf_to_mcore(ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", False), Silent())
    assert key in str(error.value)
