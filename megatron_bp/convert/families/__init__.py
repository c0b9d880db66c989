"""Model families as tables: which Hugging Face tensors make up which Megatron tensor.

A new family is one file with an entry table and a config reader, listed in `FAMILIES` below.
Specified by tests/convert/test_families.py and the golden key lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_bp.convert.families.bailing_moe_v2 import BAILING_MOE_V2
from megatron_bp.convert.families.base import Family, ModelShape
from megatron_bp.convert.families.dflash import DFLASH, DFLASH2
from megatron_bp.convert.families.gemma4 import DIFFUSION_GEMMA, GEMMA4
from megatron_bp.convert.families.llama import LLAMA
from megatron_bp.convert.families.ministral3 import MINISTRAL3, NEMOTRON_LABS
from megatron_bp.convert.families.qwen2 import QWEN2
from megatron_bp.convert.families.qwen3 import QWEN3
from megatron_bp.convert.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from megatron_bp.convert.families.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    BAILING_MOE_V2,
    MINISTRAL3,
    NEMOTRON_LABS,
    QWEN3_5,
    QWEN3_5_MOE,
    GEMMA4,
    DIFFUSION_GEMMA,
    DFLASH,
    DFLASH2,
)


def read_model(config: Mapping[str, Any]) -> tuple[Family, ModelShape]:
    """Returns the family and the shape that a Hugging Face `config.json` describes.

    Raises: ValueError for an unknown model, or listing every setting that cannot be converted.
    """
    architectures = config.get("architectures") or ()
    for family in FAMILIES:
        if any(name in family.architectures for name in architectures):
            return family, family.read_shape(config)
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family, family.read_shape(config)
    known = ", ".join(name for family in FAMILIES for name in family.model_types)
    raise ValueError(
        f"config.json has model_type={model_type!r}; the converter knows {known}. "
        f"A dense model with Llama's tensor names can be converted with model_type 'llama'."
    )
