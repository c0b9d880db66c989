"""What a profile is, and the checks that several profiles share.

Knows no engine. Specified by tests/convert/test_serve_as.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_bp.convert.bdlm_settings import BdlmSettings, exported_settings
from megatron_bp.convert.hf_assets import NESTED


@dataclass(frozen=True)
class Export:
    """A model about to be exported: its family, config.json, settings and table size.

    `canvas` is the run's --bdlm-canvas, "preset" when it has none.
    """

    family: str
    config: Mapping[str, Any]
    settings: BdlmSettings
    vocab_size: int
    tied: bool
    canvas: str = "preset"


@dataclass(frozen=True)
class Profile:
    """One engine's view of a model.

    `problems` lists what it would misread. `rewrite` returns the whole config.json. `rename` maps a
    tensor's name to the engine's. `files` are written beside, by name. `untied_head` is the tensor
    that the engine wants of a tied model as well, "" for none. `keeps_others` says whether tensors
    outside the language model are written. `zeros` returns the shapes of tensors that the engine's
    layers have and the model does not, by the engine's names: they are written as zeros.
    """

    name: str
    problems: Callable[[Export], list[str]]
    rewrite: Callable[[Export], dict[str, Any]]
    rename: Callable[[str], str] = str
    files: Mapping[str, str] = field(default_factory=dict)
    untied_head: str = ""
    keeps_others: bool = True
    zeros: Callable[[Export], Mapping[str, tuple[int, ...]]] = lambda export: {}


def family_problems(export: Export, families: tuple[str, ...], why: str) -> list[str]:
    """Returns a problem when the family is another one; `why` says what the engine would do."""
    if export.family in families:
        return []
    return [f"family={export.family} must be {' or '.join(families)}: {why}"]


def settings_problems(
    export: Export, *, alignment: str, clean_rule: str, mask_token_id: int
) -> list[str]:
    """Returns what is wrong with the settings for an engine that has these built in.

    `mask_token_id` -1 means that the engine reads it.
    """
    settings = export.settings
    if settings.objective == "none":
        return ["the model is autoregressive; convert it with ar2bdlm, or give --objective"]
    own = exported_settings(settings)
    problems = []
    if own["logit_alignment"] != alignment:
        problems.append(
            f"objective={settings.objective} has logit_alignment={own['logit_alignment']}, but the "
            f"engine reads {alignment}: every token would be taken from the wrong row"
        )
    if own["clean_rule"] != clean_rule:
        problems.append(
            f"clean_rule={own['clean_rule']} must be {clean_rule}: in the engine a finished block "
            f"sees {'all of itself' if clean_rule == 'block_causal' else 'only what is before'}; "
            f"train with --clean-rule {clean_rule}"
        )
    if export.canvas == "uniform":
        problems.append(
            "canvas=uniform: the model was trained to correct random tokens, but the engine shows "
            "it mask tokens; train with --bdlm-canvas all_masked"
        )
    if export.canvas == "seed_and_mask" and alignment == "same":
        problems.append(
            "canvas=seed_and_mask: the model always saw the first token of a block, but the engine "
            "masks it; train with --bdlm-canvas all_masked"
        )
    if mask_token_id >= 0 and settings.mask_token_id != mask_token_id:
        problems.append(
            f"mask_token_id={settings.mask_token_id} must be {mask_token_id}, which the engine has "
            f"built in; convert with --mask-token-id {mask_token_id}"
        )
    return problems


def with_top_level_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with rope_theta and rope_scaling at the top, where engines look.

    transformers 5 writes them into rope_parameters; an engine that does not find rope_theta takes
    10000.
    """
    out = dict(config)
    rope = dict(out.get("rope_parameters") or {})
    if "rope_theta" in rope:
        out.setdefault("rope_theta", rope["rope_theta"])
    if rope.get("rope_type", "default") != "default":
        out.setdefault("rope_scaling", {k: v for k, v in rope.items() if k != "rope_theta"})
    return out


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the language model's config with the outer token ids, without the other parts'."""
    nested = config.get(NESTED)
    if not nested:
        return dict(config)
    outer = {k: v for k, v in config.items() if k.endswith("token_id") or k in ("dtype",)}
    return {**nested, **{k: v for k, v in outer.items() if v is not None}}
