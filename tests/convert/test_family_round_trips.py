"""Specifies every family by whole conversions: Hugging Face to Megatron and back, bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from tests.convert.tiny_families import CASES, make_case, write_repository
from tests.convert.tiny_models import read_hf, same_bits


def _there(hf: Path, target: Path, layout: Layout = Layout.PER_LAYER, **changes: Any) -> Path:
    settings: dict[str, Any] = {"dtype": "keep", "overwrite": False} | changes
    hf_to_mcore(ImportRequest(hf, target, layout, **settings), Silent())
    return target


def _back(source: Path, target: Path) -> dict[str, Any]:
    request = ExportRequest(source, target, source / "hf", -1, "keep", 40_000, 0, -1, False)
    mcore_to_hf(request, Silent())
    return read_hf(target)


@pytest.mark.parametrize("num_files", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_restores_every_tensor_of_the_repository(
    tmp_path: Path, name: str, num_files: int
):
    config, tensors = make_case(name)
    hf = write_repository(tmp_path / "hf", config, tensors, num_files)
    after = _back(_there(hf, tmp_path / "m"), tmp_path / "back")
    assert after.keys() == tensors.keys()
    assert [key for key in tensors if not same_bits(tensors[key], after[key])] == []
