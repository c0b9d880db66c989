"""Specifies megatron_bp/convert/pass_through.py: tensors that Megatron does not own come back."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_bp.convert import families
from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.check import verify
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.families.llama import LLAMA as LLAMA_FAMILY
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from tests.convert.tiny_models import LLAMA, random_tensors, read_hf, same_bits, write_hf

# Megatron owns none of these; shapes and dtypes are of every kind.
OTHERS = {
    "visual.patch.weight": torch.randn(3, 2, 4).half(),
    "visual.scale": torch.tensor(2.5),
    "mtp.fc.weight": torch.randn(5, 7).bfloat16(),
    "mtp.ids": torch.arange(4),
}


@pytest.fixture
def hf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    family = replace(LLAMA_FAMILY, pass_through=("visual.", "mtp."))
    monkeypatch.setattr(families, "FAMILIES", (family,))
    return write_hf(tmp_path / "hf", LLAMA, random_tensors(LLAMA) | OTHERS)


def _export(tmp_path: Path, assets: Path) -> dict[str, torch.Tensor]:
    sizes = (-1, "keep", 10_000, 0, -1, False)
    mcore_to_hf(ExportRequest(tmp_path / "m", tmp_path / "back", assets, *sizes), Silent())
    return read_hf(tmp_path / "back")


@pytest.mark.parametrize("assets", ["m/hf", "hf"])
def test_the_whole_repository_comes_back_from_either_assets(tmp_path: Path, hf: Path, assets: str):
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "float32", overwrite=False)
    manifest = hf_to_mcore(request, Silent())
    assert manifest["passed_through"] == len(OTHERS)
    after = _export(tmp_path, tmp_path / assets)
    assert after.keys() == random_tensors(LLAMA).keys() | OTHERS.keys()
    assert all(same_bits(after[name], OTHERS[name]) for name in OTHERS)  # --dtype is not for them
    assert (tmp_path / "back" / "model.safetensors.index.json").exists()


def test_verify_compares_them_too(tmp_path: Path, hf: Path):
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False)
    hf_to_mcore(request, Silent())
    assert verify(hf, tmp_path / "m", Silent())["differ"] == []
    changed = {**OTHERS, "mtp.ids": torch.arange(4) + 1}
    other = write_hf(tmp_path / "other", LLAMA, random_tensors(LLAMA) | changed)
    assert verify(other, tmp_path / "m", Silent())["differ"] == ["mtp.ids"]


def test_a_lost_folder_is_noticed(tmp_path: Path, hf: Path):
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False)
    hf_to_mcore(request, Silent())
    shutil.rmtree(tmp_path / "m" / "hf" / "pass_through")
    with pytest.raises(ValueError, match=r"kept in pass_through/ \(0 of 4\); give"):
        _export(tmp_path, tmp_path / "m" / "hf")
