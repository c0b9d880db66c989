"""Specifies megatron_bp/convert/mask_wish.py: the usual mask rows, and rows worth keeping."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_bp.convert.mask_wish import MaskWish, make_rows, usual_wish
from megatron_bp.convert.safetensors_io import SafetensorsDir
from megatron_bp.convert.tokenizer_files import MaskRow, choose_mask_row, read_vocabulary
from tests.convert.tiny_models import write_tokenizer

NOTHING = MaskWish("", -1, resize=False, init="mean")
# Published conversions (facts: SDAR, Fast-dLLM v2, DFlash for Qwen3.5, Nemotron-Labs-Diffusion).
PUBLISHED = {
    "qwen3": (151669, 151936),
    "qwen3_moe": (151669, 151936),
    "qwen2": (151665, 152064),
    "qwen3_5": (248070, 248320),
    "ministral3": (100, 131072),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_family_has_the_mask_row_of_its_published_conversion(family: str):
    token_id, vocab_size = PUBLISHED[family]
    assert usual_wish(NOTHING, family, vocab_size).token_id == token_id
    assert usual_wish(NOTHING, family, token_id) == NOTHING  # outside the table
    for wish in (replace(NOTHING, token="x"), replace(NOTHING, token_id=5)):
        assert usual_wish(wish, family, vocab_size) == wish
    resize = replace(NOTHING, resize=True)
    assert usual_wish(resize, family, vocab_size) == resize


def test_qwen3s_usual_row_is_the_next_id_of_a_tokenizer_like_its_own(tmp_path: Path):
    write_tokenizer(tmp_path, 151669)  # Qwen3's has ids up to 151668
    wish = usual_wish(NOTHING, "qwen3", 151936)
    vocabulary = read_vocabulary(tmp_path)
    mask = choose_mask_row(
        vocabulary, 151936, token=wish.token, token_id=wish.token_id, resize=False
    )
    assert mask == MaskRow("<|MASK|>", 151669, is_new_token=True, is_new_row=False)


def test_other_families_have_none():
    assert usual_wish(NOTHING, "llama", 10**6) == NOTHING


def test_a_row_is_kept_only_if_it_looks_trained(tmp_path: Path):
    table = torch.randn(50, 16)
    table[7] *= 0.01
    save_file({"e": table}, tmp_path / "model.safetensors")
    source = SafetensorsDir(tmp_path)
    rows = make_rows(source, ["e"], MaskRow("<m>", 8, False, False), "keep")
    assert torch.equal(rows["e"].values, table[8])
    assert rows["e"].replaced_norm == pytest.approx(float(table[8].norm()))
    with pytest.raises(ValueError, match=r"row 7 of e has norm 0\.0.*was not trained; use mean"):
        make_rows(source, ["e"], MaskRow("<m>", 7, False, False), "keep")
    with pytest.raises(ValueError, match="keep needs an existing row"):
        make_rows(source, ["e"], MaskRow("<m>", 50, True, True), "keep")
    mean = make_rows(source, ["e"], MaskRow("<m>", 50, True, True), "mean")
    assert mean["e"].replaced_norm == -1
