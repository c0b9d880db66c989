"""Specifies gemma_to_diffusion.py: what is copied, what is new, and that transformers agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_bp.convert.ar_to_bdlm import ImportRequest
from megatron_bp.convert.check import verify
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.gemma_to_diffusion import Fresh, gemma_to_diffusion
from megatron_bp.convert.link import TensorInfo
from megatron_bp.convert.mask_wish import MaskWish
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from megatron_bp.convert.torch_dist_io import TorchDistReader
from tests.convert.directories import assert_same_files
from tests.convert.tiny_families import transformers_repository, write_repository
from tests.convert.tiny_models import read_hf, same_bits

NO_WISH = MaskWish("", -1, resize=False, init="mean")
TEXT = "model.language_model."
NEW = "model.decoder.self_conditioning."


@given(
    lo=st.integers(0, 40),
    rows=st.integers(1, 300),
    cut=st.integers(0, 300),
    width=st.integers(1, 9),
)
def test_new_rows_do_not_depend_on_how_they_are_cut(lo: int, rows: int, cut: int, width: int):
    fresh = Fresh(TensorInfo((400, width), torch.float32), 0.0, std=0.02, stream=1)
    whole, parts = torch.empty(rows, width), torch.empty(rows, width)
    fresh.fill(lo, whole)
    cut = min(cut, rows)
    fresh.fill(lo, parts[:cut])
    fresh.fill(lo + cut, parts[cut:])
    assert torch.equal(whole, parts)


def test_new_rows_are_normal_and_differ_between_tensors():
    info = TensorInfo((500, 40), torch.float64)
    first, second = torch.empty(500, 40).double(), torch.empty(500, 40).double()
    Fresh(info, 0.0, std=0.5, stream=1).fill(0, first)
    Fresh(info, 0.0, std=0.5, stream=2).fill(0, second)
    for drawn in (first, second):  # 20000 values: the mean within 5 standard errors
        assert abs(float(drawn.mean())) < 5 * 0.5 / 20000**0.5
        assert abs(float(drawn.std()) - 0.5) < 0.0125
        assert 0.28 < float((drawn.abs() > 0.5).double().mean()) < 0.36  # normal: 0.317
    assert len(first.unique()) == first.numel()
    assert abs(float((first * second).mean())) < 5 * 0.25 / 20000**0.5


@pytest.fixture(scope="module")
def source() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return transformers_repository("gemma4_moe", tied=True)


def _convert(hf: Path, target: Path, **changes: Any) -> dict[str, Any]:
    request = ImportRequest(hf, target, Layout.PER_LAYER, "keep", overwrite=False, **changes)
    return gemma_to_diffusion(request, 8, NO_WISH, Silent())


def _export(m: Path, target: Path, **changes: Any) -> dict[str, Any]:
    return mcore_to_hf(
        ExportRequest(m, target, m / "hf", -1, "keep", 10**9, 0, -1, False, **changes), Silent()
    )


def test_every_tensor_is_copied_bit_by_bit_and_the_scalars_twice(tmp_path: Path, source):
    config, tensors = source
    hf = write_repository(tmp_path / "hf", config, tensors, num_files=3)
    manifest = _convert(hf, tmp_path / "m")
    said = {k: manifest[k] for k in ("family", "objective", "alignment", "block_size")}
    assert said == {
        "family": "diffusion_gemma", "objective": "diffusion_gemma",
        "alignment": "same_position", "block_size": 8,
    }  # fmt: skip
    exported = _export(tmp_path / "m", tmp_path / "back", serve_as="diffusion_gemma")
    assert {k: exported[k] for k in said} == said
    after = read_hf(tmp_path / "back")
    expected = {}
    for name, tensor in tensors.items():
        moved = name.replace(TEXT, "model.decoder.")
        expected[moved if moved != name else name.replace("model.", "model.encoder.", 1)] = tensor
        if name.endswith("layer_scalar"):
            expected[name.replace(TEXT, "model.encoder.language_model.")] = tensor
    fresh = {name: tensor for name, tensor in after.items() if name.startswith(NEW)}
    assert after.keys() - fresh.keys() == expected.keys()
    assert [name for name in expected if not same_bits(after[name], expected[name])] == []
    assert [name.removeprefix(NEW) for name in sorted(fresh)] == [
        "down_proj.weight", "gate_proj.weight", "pre_norm.weight", "up_proj.weight",
    ]  # fmt: skip
    assert torch.equal(fresh[f"{NEW}pre_norm.weight"], torch.ones(48).bfloat16())
    assert not fresh[f"{NEW}down_proj.weight"].any()
    for name in ("gate", "up"):
        assert 0.018 < fresh[f"{NEW}{name}_proj.weight"].float().std() < 0.022
    keys = TorchDistReader(tmp_path / "m" / "release").tensors
    assert {"decoder.layers.0.layer_scalar", "decoder.layers.0.encoder_layer_scalar"} <= keys.keys()
    for repository in (hf, tmp_path / "back"):
        result = verify(repository, tmp_path / "m", Silent())
        assert (result["differ"], result["tensors"]) == ([], len(after))
    changed = {
        **tensors,
        f"{TEXT}layers.1.layer_scalar": tensors[f"{TEXT}layers.1.layer_scalar"] + 1,
    }
    other = write_repository(tmp_path / "other", config, changed)
    assert verify(other, tmp_path / "m", Silent())["differ"] == [
        f"model.{part}.layers.1.layer_scalar" for part in ("decoder", "encoder.language_model")
    ]
    # The same conversion by two processes has the same bytes.
    _convert(hf, tmp_path / "again", workers=2)
    assert_same_files(tmp_path / "m", tmp_path / "again")


def test_the_config_is_that_of_diffusion_gemma(tmp_path: Path, source):
    from transformers import DiffusionGemmaConfig

    hf = write_repository(tmp_path / "hf", *source)
    _convert(hf, tmp_path / "m")
    written = json.loads((tmp_path / "m" / "hf" / "config.json").read_text())
    assert "audio_config" not in written
    assert not {"enable_moe_block", "attention_k_eq_v"} & written["text_config"].keys()
    config = DiffusionGemmaConfig.from_pretrained(tmp_path / "m" / "hf")
    assert (config.canvas_length, config.architectures) == (8, ["DiffusionGemmaForBlockDiffusion"])
    assert config.text_config.use_bidirectional_attention == "vision"
    assert config.text_config.num_experts == 4


def test_the_encoder_computes_what_gemma_did_and_nothing_depends_on_an_untrained_signal(
    tmp_path: Path,
):
    from transformers import DiffusionGemmaForBlockDiffusion

    from tests.convert.family_models import BUILDERS

    torch.manual_seed(0)
    gemma = BUILDERS["gemma4_moe"](True).float().eval()
    with torch.no_grad():
        for name, tensor in gemma.state_dict().items():
            if name.startswith(TEXT) and tensor.is_floating_point():
                tensor.normal_(1.0 if "norm" in name or "scal" in name else 0.0, 0.1)
    gemma.save_pretrained(tmp_path / "hf")
    _convert(tmp_path / "hf", tmp_path / "m")
    _export(tmp_path / "m", tmp_path / "back", serve_as="diffusion_gemma")
    model, loading = DiffusionGemmaForBlockDiffusion.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 101, (2, 24), generator=generator)
    canvas = torch.randint(0, 101, (2, 8), generator=generator)
    with torch.no_grad():
        expected = gemma(tokens).logits
        out = model.eval()(tokens, decoder_input_ids=canvas)
        logits = 30.0 * torch.tanh(model.lm_head(out.encoder_last_hidden_state) / 30.0)
        again = model(tokens, decoder_input_ids=canvas, self_conditioning_logits=out.logits)
        # Sliding windows of 16 tokens hide the first ones: the prefix matters nonetheless.
        other = model(tokens.flip(1), decoder_input_ids=canvas).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert torch.equal(out.logits, again.logits)
    assert (out.logits - other).abs().max() > 0.01


def _without(key: str) -> Any:
    def change(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if key in name]:
            del tensors[name]

    return change


def _with_audio(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.audio_tower.x.weight"] = torch.zeros(2)


def _no_cap(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["text_config"] = {**config["text_config"], "final_logit_softcapping": None}


@pytest.mark.parametrize(
    ("name", "tied", "change", "text"),
    [
        ("gemma4", True, None, "enable_moe_block=false: every layer of DiffusionGemma has experts"),
        ("gemma4_with_v", True, None, "is a text model alone, but DiffusionGemma has a vision tow"),
        ("gemma4_moe", False, None, "the head must be tied to the embedding"),
        ("gemma4_moe", True, _with_audio, "audio_tower: it has no audio; remove these tensors"),
        ("gemma4_moe", True, _without("vision_tower"), "there are no model.vision_tower tensors"),
        ("gemma4_moe", True, _no_cap, "final_logit_softcapping=None must be positive"),
        ("qwen3", True, None, "family=qwen3 must be gemma4"),
    ],
)
def test_what_diffusion_gemma_does_not_have_is_refused(
    tmp_path: Path, name: str, tied: bool, change: Any, text: str
):
    config, tensors = transformers_repository(name, tied=tied)
    if change:
        change(config, tensors)
    hf = write_repository(tmp_path / "hf", config, tensors)
    with pytest.raises(ValueError, match="no DiffusionGemma can be made") as error:
        _convert(hf, tmp_path / "m")
    assert text in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_mask_token_and_an_empty_canvas_are_refused(tmp_path: Path, source):
    hf = write_repository(tmp_path / "hf", *source)
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False)
    for wish in (MaskWish("<m>", -1, False, "mean"), MaskWish("", 100, False, "mean")):
        with pytest.raises(ValueError, match="starts from random tokens; leave out --mask-token"):
            gemma_to_diffusion(request, 8, wish, Silent())
    with pytest.raises(ValueError, match=r"canvas length \(--block-size\) 0 must be at least 1"):
        gemma_to_diffusion(request, 0, NO_WISH, Silent())
