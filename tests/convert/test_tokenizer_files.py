"""Specifies convert/tokenizer_files.py: the mask id is free, reachable and inside the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from megatron_bp.convert.tokenizer_files import (
    MaskRow,
    choose_mask_row,
    edit_tokenizer,
    read_vocabulary,
)
from tests.convert.tiny_models import write_tokenizer

NUM_TOKENS = 40


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, NUM_TOKENS)
    (tmp_path / "config.json").write_text(json.dumps({"pad_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4]}))
    return tmp_path


def _choose(folder: Path, num_rows: int = NUM_TOKENS, **wish: Any) -> MaskRow:
    given = {"token": "", "token_id": -1, "resize": False, **wish}
    return choose_mask_row(read_vocabulary(folder), num_rows, **given)


def _add(folder: Path, content: str) -> None:
    edit_tokenizer(folder, MaskRow(content, read_vocabulary(folder).next_id, True, False))


@pytest.mark.parametrize(
    ("wish", "num_rows", "expected"),
    [
        ({"token": "<m>", "resize": True}, 40, MaskRow("<m>", 40, True, True)),
        ({"token_id": 40, "resize": True}, 40, MaskRow("<|MASK|>", 40, True, True)),
        ({"token_id": 40}, 48, MaskRow("<|MASK|>", 40, True, False)),
        ({"token": "<m>"}, 48, MaskRow("<m>", 40, True, False)),
        ({"token": "<m>", "token_id": 40}, 48, MaskRow("<m>", 40, True, False)),
    ],
)
def test_a_new_mask_token_encodes_to_its_id_alone(
    folder: Path, wish: dict[str, Any], num_rows: int, expected: MaskRow
):
    mask = _choose(folder, num_rows, **wish)
    assert mask == expected
    edit_tokenizer(folder, mask)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(mask.token, add_special_tokens=False).ids == [mask.token_id]
    around = tokenizer.encode(f"a{mask.token}b", add_special_tokens=False).ids
    assert around == [3, mask.token_id, 4]
    assert tokenizer.decode([mask.token_id], skip_special_tokens=False) == mask.token
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["mask_token"] == mask.token
    assert settings["added_tokens_decoder"][str(mask.token_id)]["content"] == mask.token
    assert settings["chat_template"] == "{{ messages }}"
    special = json.loads((folder / "special_tokens_map.json").read_text())
    assert special["mask_token"] == mask.token
    assert special["eos_token"] == "</s>"


def test_a_reserved_token_is_used_as_it_is(folder: Path):
    _add(folder, "<|reserved_7|>")
    mask = MaskRow("<|reserved_7|>", 40, False, False)
    assert _choose(folder, 48, token_id=40) == mask
    assert _choose(folder, 48, token="<|reserved_7|>") == mask
    before = (folder / "tokenizer.json").read_text()
    edit_tokenizer(folder, mask)
    assert (folder / "tokenizer.json").read_text() == before


@pytest.mark.parametrize(
    ("wish", "num_rows", "text"),
    [
        # An unknown string: tokenizers answer the unknown token's id, here 0, without a word.
        (
            {"token": "<mask>"},
            40,
            r"silently answer id 0 \(unk_token\).*--resize --mask-token '<mask>'",
        ),
        ({"token_id": 0}, 40, r"'<unk>'\) is the tokenizer's unk_token.*--resize"),
        ({"token_id": 1}, 48, r"bos_token.*--mask-token-id 40 \(an unused row"),
        ({"token": "</s>"}, 40, "is the tokenizer's eos_token"),
        ({"token_id": 3}, 40, "is the tokenizer's pad_token"),  # from config.json
        ({"token_id": 4}, 40, "is the tokenizer's eos_token"),  # from generation_config.json
        ({"token_id": 30}, 40, "is an ordinary vocabulary entry"),
        ({"token_id": 40}, 40, "outside the table of 40 rows; --resize"),
        ({"token_id": 44}, 48, "next id 40; --mask-token-id 40"),
        ({"token_id": 99}, 48, "next id 40"),
        ({"token": "<m>", "resize": True}, 48, "--resize adds row 48, but .* next id is 40"),
        ({"token": "<m>"}, 30, "40 ids and the table 30 rows"),
        ({"token": "</s>", "token_id": 7}, 40, "has id 2, not mask_token_id=7"),
        ({}, 40, "no mask token given.*--resize"),
    ],
)
def test_ids_in_use_or_out_of_reach_are_refused_with_a_value_that_works(
    folder: Path, wish: dict[str, Any], num_rows: int, text: str
):
    with pytest.raises(ValueError, match=text):
        _choose(folder, num_rows, **wish)


def test_added_tokens_in_use_and_needless_resizes_are_refused(folder: Path):
    _add(folder, "<|im_start|>")
    with pytest.raises(ValueError, match="is an added token in use"):
        _choose(folder, 48, token_id=40)
    _add(folder, "<|mask_0|>")
    with pytest.raises(ValueError, match="leave --resize out"):
        _choose(folder, 48, token="<|mask_0|>", resize=True)
    with pytest.raises(ValueError, match=r"--mask-token-id 41 \('<\|mask_0\|>'\) would work"):
        _choose(folder, 48, token_id=40)


def test_a_directory_without_fast_tokenizer_is_refused(folder: Path):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        read_vocabulary(folder)
