"""Specifies megatron_bp/convert/mask_row.py: one row changes, every other bit stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_bp.convert.mask_row import MaskRowSource, mean_row, stored_row
from megatron_bp.convert.safetensors_io import SafetensorsDir
from tests.convert.tiny_models import same_bits

TABLE = torch.randn(9, 5).bfloat16()


@pytest.fixture
def source(tmp_path: Path) -> SafetensorsDir:
    save_file({"table": TABLE, "other": TABLE.clone()}, tmp_path / "model.safetensors")
    return SafetensorsDir(tmp_path)


@pytest.mark.parametrize("row", [0, 4, 8, 9])
def test_only_the_mask_row_changes_in_any_row_range(source: SafetensorsDir, row: int):
    value = torch.arange(5).bfloat16()
    expected = torch.cat([TABLE, value[None]]) if row == 9 else TABLE.clone()
    expected[row] = value
    masked = MaskRowSource(source, row, {"table": value})
    rows = expected.shape[0]
    assert masked.tensors["table"].shape == (rows, 5)
    assert masked.tensors["other"].shape == (9, 5)
    for lo in range(rows):
        for hi in range(lo + 1, rows + 1):
            out = torch.full((hi - lo, 5), torch.nan, dtype=torch.bfloat16)
            masked.read_rows_into("table", lo, out)
            assert same_bits(out, expected[lo:hi])
    blocks = torch.cat([block for _, block in masked.iter_rows("table")])
    assert same_bits(blocks, expected)
    other = torch.empty(9, 5, dtype=torch.bfloat16)
    masked.read_rows_into("other", 0, other)
    assert same_bits(other, TABLE)


def test_mean_row_leaves_the_mask_row_out_and_rounds_once(source: SafetensorsDir):
    everything = mean_row(source, "table", 9)
    assert same_bits(everything.values, TABLE.double().mean(0).float().bfloat16())
    assert everything.norm == pytest.approx(float(everything.values.double().norm()))
    without = mean_row(source, "table", 3)
    kept = torch.cat([TABLE[:3], TABLE[4:]]).double()
    assert same_bits(without.values, kept.mean(0).float().bfloat16())
    assert without.mean_row_norm == pytest.approx(float(kept.norm(dim=1).mean()))


def test_stored_row_is_the_row(source: SafetensorsDir):
    assert same_bits(stored_row(source, "table", 3).values, TABLE[3])
