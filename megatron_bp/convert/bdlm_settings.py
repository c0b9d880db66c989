"""The block-diffusion settings that travel with converted weights, and the conversion manifest.

Owns the manifest's fields. Specified by tests/convert/test_ar_to_bdlm.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bp import __version__
from megatron_bp.convert.staging import MANIFEST_NAME

MEGATRON_CORE_VERSION = "0.19.2"
"""The megatron-core release whose checkpoint format is written (golden keys: tests/golden)."""

# A row's logit predicts its own position, or the next one.
ALIGNMENT_OF_OBJECTIVE = {
    "standard": "same_position",
    "bd3lm": "same_position",
    "fast_dllm_v2": "shifted",
    "sdar": "same_position",
    "llada2": "same_position",
    "nemotron_labs": "same_position",
    "none": "next",
}
CLEAN_RULES = ("preset", "token_causal", "block_causal")


@dataclass(frozen=True)
class BdlmSettings:
    """Objective, block size (tokens) and mask token; objective "none" is autoregressive."""

    objective: str
    block_size: int
    clean_rule: str
    mask_token: str
    mask_token_id: int

    def __post_init__(self) -> None:
        """Raises: ValueError listing every setting that is out of range."""
        problems = []
        if self.objective not in ALIGNMENT_OF_OBJECTIVE:
            problems.append(
                f"objective={self.objective!r} must be one of {', '.join(ALIGNMENT_OF_OBJECTIVE)}"
            )
        if self.clean_rule not in CLEAN_RULES:
            problems.append(
                f"clean_rule={self.clean_rule!r} must be one of {', '.join(CLEAN_RULES)}"
            )
        if self.objective != "none" and self.block_size < 1:
            problems.append(f"block_size={self.block_size} must be at least 1; 32 is usual")
        if problems:
            raise ValueError("; ".join(problems))


AUTOREGRESSIVE = BdlmSettings("none", 0, "preset", "", -1)


# The names that exported config.json files use, and the clean rule of an objective's preset.
_LOGIT_ALIGNMENT = {"same_position": "same", "shifted": "shifted", "next": "shifted"}
_PRESET_RULE = {
    "standard": "token_causal",
    "bd3lm": "block_causal",
    "fast_dllm_v2": "block_causal",
    "sdar": "block_causal",
    "llada2": "block_causal",
    "nemotron_labs": "token_causal",
}


def exported_settings(bdlm: BdlmSettings) -> dict[str, Any]:
    """Returns the config.json keys, beside the mask id, by which an exported model is used."""
    rule = bdlm.clean_rule
    return {
        "block_size": bdlm.block_size,
        "logit_alignment": _LOGIT_ALIGNMENT[ALIGNMENT_OF_OBJECTIVE[bdlm.objective]],
        "clean_rule": _PRESET_RULE[bdlm.objective] if rule == "preset" else rule,
    }


def settings_fields(bdlm: BdlmSettings) -> dict[str, Any]:
    """Returns the settings as a manifest has them."""
    return {
        "objective": bdlm.objective,
        "alignment": ALIGNMENT_OF_OBJECTIVE[bdlm.objective],
        "block_size": bdlm.block_size,
        "clean_rule": bdlm.clean_rule,
        "mask_token": bdlm.mask_token,
        "mask_token_id": bdlm.mask_token_id,
    }


def hash_files(files: Iterable[Path]) -> dict[str, str]:
    """Returns the SHA-256 of small files by file name."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def write_manifest(directory: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Writes `bdlm_conversion.json` with the given fields and the versions, and returns it."""
    manifest = {
        "tool": "megatron_bp",
        "tool_version": __version__,
        "megatron_core_version": MEGATRON_CORE_VERSION,
        **fields,
    }
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_manifest(directory: Path) -> dict[str, Any]:
    """Returns the manifest of a converted directory, {} when it has none."""
    path = directory / MANIFEST_NAME
    return dict(json.loads(path.read_text())) if path.is_file() else {}
