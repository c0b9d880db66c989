"""Specifies that an offset (norm - 1) is undone bit by bit unless training changed the value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.pass_through import restore_original
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from megatron_bp.convert.torch_dist_io import TorchDistReader
from tests.convert.tiny_families import make_case, write_repository
from tests.convert.tiny_models import read_hf, same_bits


def _all_bf16() -> torch.Tensor:
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    return bits[bits.isfinite()]


def _fp32_of_all_sizes() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4096, generator=generator) * 2.0 ** torch.arange(-126, 2).repeat(32)
    return torch.cat([values, torch.tensor([0.0, -0.0, 1e-45, 3e38, 1.0, 0.5, 2.0])])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("original", [_all_bf16(), _fp32_of_all_sizes()])
def test_what_training_left_alone_is_restored_exactly(original: torch.Tensor, stored: torch.dtype):
    # Also from a checkpoint that training saved in bf16, where w - 1 has lost bits.
    kept = (original.double() - 1).to(stored)
    values = (kept.double() + 1).to(stored)
    assert not torch.equal(values.to(original.dtype), original)  # arithmetic alone is not enough
    assert same_bits(restore_original(values, original, -1.0), original)


def test_what_training_changed_is_rounded_once():
    original = torch.tensor([1.0, 0.25, -0.0], dtype=torch.bfloat16)
    values = torch.tensor([1.0, 0.25390625, 0.0])
    restored = restore_original(values, original, -1.0)
    assert same_bits(restored, torch.tensor([1.0, 0.25390625, -0.0]).bfloat16())
    assert restored[1] != original[1]


NORM = "linear_attn.norm.weight"


def _convert(tmp_path: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], Path]:
    config, tensors = make_case("qwen3_5-released")
    hf = write_repository(tmp_path / "hf", config, tensors)
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False)
    hf_to_mcore(replace(request, **changes), Silent())
    return tensors, tmp_path / "m"


def test_decay_and_norm_keep_fp32_whatever_dtype_is_asked_for(tmp_path: Path):
    tensors, checkpoint = _convert(tmp_path, dtype="float16")
    stored = TorchDistReader(checkpoint / "release").tensors
    prefix = "decoder.layers.0.self_attention."
    assert stored[f"{prefix}A_log"].dtype == torch.float32
    assert stored[f"{prefix}out_norm.weight"].dtype == torch.float32
    assert stored[f"{prefix}dt_bias"].dtype == torch.float16
    request = ExportRequest(
        checkpoint, tmp_path / "b", checkpoint / "hf", -1, "bfloat16", 10**9, 0, -1, overwrite=False
    )
    mcore_to_hf(request, Silent())
    after = read_hf(tmp_path / "b")
    pinned = [name for name in tensors if name.endswith((NORM, "A_log"))]
    assert len(pinned) == 6
    assert all(same_bits(after[name], tensors[name]) for name in pinned)
    rest = {after[name].dtype for name in tensors if name not in pinned}
    assert rest == {torch.bfloat16}


def test_without_the_originals_the_norm_is_arithmetic_in_fp32(tmp_path: Path):
    tensors, checkpoint = _convert(tmp_path)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text((checkpoint / "hf/config.json").read_text())
    (checkpoint / "bdlm_conversion.json").unlink()
    request = ExportRequest(
        checkpoint, tmp_path / "b", tmp_path / "assets", -1, "keep", 10**9, 0, -1, overwrite=False
    )
    mcore_to_hf(request, Silent())
    after = read_hf(tmp_path / "b")
    assert not any(name.startswith(("mtp.", "model.visual.")) for name in after)
    for name in (name for name in after if name.endswith(NORM)):
        torch.testing.assert_close(after[name], tensors[name], rtol=0, atol=2**-24)
        assert not torch.equal(after[name], tensors[name])  # why the originals are kept
