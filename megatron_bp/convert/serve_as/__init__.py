"""Export profiles: the names, config keys and files by which a serving engine knows a model.

A profile refuses what its engine would misread, because engines do not check: they decode with the
mask id, block size and alignment that they have built in. Specified by
tests/convert/test_serve_as.py, which names the source of every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_bp.convert.bdlm_settings import exported_settings
from megatron_bp.convert.hf_assets import with_config_keys
from megatron_bp.convert.serve_as.base import Export, Profile
from megatron_bp.convert.serve_as.block_models import (
    DIFFUSION_GEMMA,
    FAST_DLLM_V2,
    LLADA2,
    NEMOTRON_LABS,
    SDAR,
)
from megatron_bp.convert.serve_as.drafters import DFLASH, DFLASH2

AS_IT_IS = "as_it_is"
"""The name of no profile: the source's own architecture, with the block settings in its config."""

PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (SDAR, FAST_DLLM_V2, LLADA2, NEMOTRON_LABS, DIFFUSION_GEMMA, DFLASH, DFLASH2)
}


def _as_it_is(export: Export) -> dict[str, Any]:
    settings = export.settings
    if settings.objective == "none":
        return dict(export.config)
    keys = {"mask_token_id": settings.mask_token_id, **exported_settings(settings)}
    return with_config_keys(export.config, keys)


def find_profile(name: str, export: Export) -> Profile:
    """Returns the profile, for a model that its engine would read rightly.

    Raises: ValueError listing everything that it would misread, with what would work.
    """
    if name == AS_IT_IS:
        return Profile(AS_IT_IS, lambda export: [], _as_it_is)
    if name not in PROFILES:
        known = ", ".join((AS_IT_IS, *PROFILES))
        raise ValueError(f"serve_as={name!r} must be one of {known}")
    problems = PROFILES[name].problems(export)
    if problems:
        raise ValueError(f"serve_as={name} cannot be written:\n  " + "\n  ".join(problems))
    return PROFILES[name]
