"""Ministral-3 and Nemotron-Labs-Diffusion: Llama's table under other names, with YaRN.

Nemotron-Labs-Diffusion 3B, 8B and 14B start from Ministral-3 and keep its tensors under `encoder.*`
and `diffusion_head.weight`. Ministral-3 comes as a text model (`model.*`) or with a vision tower
(`language_model.model.*`, `language_model.lm_head.weight`); the tower passes through.

`llama_4_scaling_beta` scales queries from position original_max_position_embeddings on. Megatron
has no such setting: it is kept in the checkpoint's args and noted in the flags file.
Specified by tests/convert/test_families.py; logits with YaRN by test_family_megatron.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_bp.convert.families.base import Family, ModelShape
from megatron_bp.convert.families.composite import settle_names, text_config
from megatron_bp.convert.families.dense import read_dense_shape
from megatron_bp.convert.families.llama import (
    DENSE_EXTRA_STATES,
    DENSE_HEAD,
    DENSE_LAYER,
    DENSE_LAYER_EXTRA_STATES,
    DENSE_TOP,
)

# Ministral3Config's default: a config without these fields has this YaRN.
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_ministral3_shape(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape of a Ministral-3 config, of the text model or with vision."""
    if config.get("model_type") != "mistral3":
        return _read_text(config, "ministral3")
    text = text_config(config, tied_by_default=True)
    if text.get("model_type") != "ministral3":
        raise ValueError(
            f"config.json has text_config.model_type={text.get('model_type')!r}; of the mistral3 "
            f"models only those with a 'ministral3' text model convert"
        )
    return replace(
        _read_text(text, "ministral3"),
        layer_prefix="language_model.model.layers.",
        head_name="language_model.lm_head.weight",
        tie_disputed=text["tie_disputed"],
    )


def read_nemotron_labs_shape(config: Mapping[str, Any]) -> ModelShape:
    """Returns the shape of a Nemotron-Labs-Diffusion config."""
    return replace(
        _read_text(config, "nemotron_labs_diffusion"),
        layer_prefix="encoder.layers.",
        head_name="diffusion_head.weight",
    )


def _read_text(config: Mapping[str, Any], family: str) -> ModelShape:
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        if family != "ministral3":
            raise ValueError(
                "config.json has neither rope_parameters nor rope_scaling; Nemotron-Labs-Diffusion "
                f"needs its YaRN settings, for example {_DEFAULT_ROPE}"
            )
        config = {**config, "rope_parameters": _DEFAULT_ROPE}
    return read_dense_shape(
        {"head_dim": 128, "rms_norm_eps": 1e-5, **config},
        family=family,
        qk_norm=False,
        refuse_bias=("attention_bias", "mlp_bias"),
    )


MINISTRAL3 = Family(
    name="ministral3",
    model_types=("ministral3", "mistral3"),
    top=DENSE_TOP,
    head=DENSE_HEAD,
    layer=DENSE_LAYER,
    extra_states=DENSE_EXTRA_STATES,
    layer_extra_states=DENSE_LAYER_EXTRA_STATES,
    read_shape=read_ministral3_shape,
    pass_through=(
        "vision_tower.",
        "multi_modal_projector.",
        "model.vision_tower.",
        "model.multi_modal_projector.",
    ),
    adapt=settle_names(
        ("model.language_model.layers.", "lm_head.weight"),
        ("model.layers.", "lm_head.weight"),
        ("language_model.model.layers.", "language_model.lm_head.weight"),
    ),
)
NEMOTRON_LABS = Family(
    name="nemotron_labs_diffusion",
    model_types=("nemotron_labs_diffusion",),
    top=DENSE_TOP,
    head=DENSE_HEAD,
    layer=DENSE_LAYER,
    extra_states=DENSE_EXTRA_STATES,
    layer_extra_states=DENSE_LAYER_EXTRA_STATES,
    read_shape=read_nemotron_labs_shape,
    architectures=("NemotronLabsDiffusionModel", "MinistralDiffEncoderModel"),
)
