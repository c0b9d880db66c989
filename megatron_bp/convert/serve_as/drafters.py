"""The profiles of DFlash and DFlash2 drafters: every key written that engines otherwise guess.

Read: SGLang 0.5.23 (speculative/dflash_utils.py, models/dflash.py), vLLM and speculators by their
issues (docs/convert.md). Engines guess causality from the layer type, so it is always said.
"""

from __future__ import annotations

from typing import Any

from megatron_bp.convert.serve_as.base import Export, Profile, family_problems, with_top_level_rope

_MANDATORY = ("mask_token_id", "target_layer_ids", "block_size")
_SECOND = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def _own(config: Any) -> dict[str, Any]:
    own = dict(config.get("dflash_config") or {})
    own.setdefault("block_size", config.get("block_size"))
    causal = own.get("causal", config.get("is_causal"))
    return {**own, "causal": causal}


def _problems(export: Export, family: str, keys: tuple[str, ...]) -> list[str]:
    config = export.config
    problems = family_problems(export, (family,), "a drafter's tensors are not a language model's")
    own = _own(config)
    problems += [
        f"dflash_config.{name} is missing; engines that guess it guess wrong"
        for name in keys
        if not own.get(name) and not (name == "mask_token_id" and own.get(name) == 0)
    ]
    if not isinstance(own["causal"], bool):
        problems.append(
            "is_causal is missing: without it engines take sliding layers as causal and full ones "
            "as bidirectional; set it in the assets' config.json as trained (false for most)"
        )
    if not isinstance(config.get("num_target_layers"), int):
        problems.append("num_target_layers is missing; it bounds target_layer_ids")
    elif (
        own.get("target_layer_ids") and max(own["target_layer_ids"]) >= config["num_target_layers"]
    ):
        problems.append(
            f"target_layer_ids={own['target_layer_ids']} must be below "
            f"num_target_layers={config['num_target_layers']}"
        )
    kinds = config.get("layer_types") or []
    if len(kinds) != config.get("num_hidden_layers"):
        problems.append(f"layer_types has {len(kinds)} entries; it must have one for every layer")
    if "sliding_attention" in kinds and not config.get("sliding_window"):
        problems.append("sliding_window is missing, but layer_types has sliding_attention")
    return problems


def _rewrite(export: Export, architecture: str) -> dict[str, Any]:
    config = with_top_level_rope(export.config)
    own = _own(config)
    return {
        **config,
        "architectures": [architecture],
        "model_type": "qwen3",
        "block_size": own["block_size"],
        "is_causal": own["causal"],
        "use_sliding_window": "sliding_attention" in config["layer_types"],
        "dflash_config": own,
    }


def _first_config(export: Export) -> dict[str, Any]:
    return _rewrite(export, "DFlashDraftModel")


def _second_config(export: Export) -> dict[str, Any]:
    config = _rewrite(export, "DFlash2DraftModel")
    return {**config, "dflash_config": {**config["dflash_config"], "projector_type": "dflash2"}}


def _first_problems(export: Export) -> list[str]:
    own = _own(export.config)
    return _problems(export, "dflash", _MANDATORY) + [
        f"dflash_config.{name}={own[name]} belongs to DFlash2: the engine would build that part "
        f"with random weights; remove it"
        for name in _SECOND
        if own.get(name)
    ]


DFLASH = Profile("dflash", _first_problems, _first_config)
DFLASH2 = Profile(
    "dflash2",
    lambda export: _problems(export, "dflash2", _MANDATORY + _SECOND),
    _second_config,
)
