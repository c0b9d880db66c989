"""Specifies megatron_bp/convert/export_settings.py: who says what, and what is never guessed."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_bp.convert.bdlm_settings import AUTOREGRESSIVE, exported_settings
from megatron_bp.convert.export_settings import ExportWish, find_settings

TRAINED = {
    "bdlm_objective": "fast_dllm_v2",
    "block_size": 16,
    "clean_rule": "preset",
    "mask_token_id": 7,
}
MANIFEST = {
    "objective": "fast_dllm_v2",
    "block_size": 16,
    "clean_rule": "preset",
    "mask_token_id": 7,
    "mask_token": "<m>",
}
NONE: dict[str, Any] = {}


def test_a_training_checkpoint_says_everything_itself():
    found = find_settings(ExportWish(), TRAINED, NONE, NONE)
    assert (found.objective, found.block_size, found.mask_token_id) == ("fast_dllm_v2", 16, 7)
    assert exported_settings(found) == {
        "block_size": 16, "logit_alignment": "shifted", "clean_rule": "block_causal",
    }  # fmt: skip
    other = find_settings(ExportWish(), {**TRAINED, "bdlm_objective": "standard"}, NONE, NONE)
    assert exported_settings(other) == {
        "block_size": 16, "logit_alignment": "same", "clean_rule": "token_causal",
    }  # fmt: skip


def test_assets_speak_when_the_checkpoint_does_not_and_wishes_come_first():
    assert find_settings(ExportWish(), NONE, NONE, MANIFEST).mask_token == "<m>"
    wish = ExportWish("standard", 4, "block_causal", 9)
    found = find_settings(wish, TRAINED, {"block_size": 8}, MANIFEST)
    assert (found.objective, found.block_size) == ("standard", 4)
    assert (found.clean_rule, found.mask_token_id) == ("block_causal", 9)


@pytest.mark.parametrize("args", [NONE, {"bdlm_objective": "none", "block_size": 32}])
def test_a_model_without_blocks_is_autoregressive(args: dict[str, Any]):
    assert find_settings(ExportWish(), args, NONE, NONE) == AUTOREGRESSIVE


@pytest.mark.parametrize(
    ("wish", "args", "config", "text"),
    [
        (ExportWish(), NONE, {"block_size": 8, "mask_token_id": 7}, "give --objective"),
        (ExportWish(objective="standard"), NONE, NONE, "block size .* give --block-size"),
        (ExportWish(), TRAINED, {"block_size": 8}, "block_size=16, but .* says 8; give --block-"),
        (ExportWish(), TRAINED, {"clean_rule": "token_causal"}, NONE),
        (ExportWish("wrong", 4), NONE, NONE, "objective='wrong' must be one of"),
    ],
)
def test_what_nobody_says_or_two_say_differently_is_asked_for(
    wish: ExportWish, args: dict[str, Any], config: dict[str, Any], text: Any
):
    if text is NONE:  # "preset" is no statement against an explicit rule
        assert find_settings(wish, args, config, NONE).clean_rule == "token_causal"
        return
    with pytest.raises(ValueError, match=text):
        find_settings(wish, args, config, NONE)
