"""Reads the text part of a config that also describes vision or audio (`text_config`).

Specified by tests/convert/test_families.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron_bp.convert.families.base import ModelShape, settle_tie


def text_config(config: Mapping[str, Any], *, tied_by_default: bool) -> dict[str, Any]:
    """Returns the text model's config, with `tie_word_embeddings` and `tie_disputed` settled.

    transformers ties the head as the outer config says. Files leave it out there, or say something
    else in `text_config` (transformers PR 43429), and other loaders read the inner one: then
    `tie_disputed` is true and the tensors decide.
    Raises: ValueError when there is no `text_config`.
    """
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise ValueError(
            f"config.json has model_type={config.get('model_type')!r} but no text_config; give the "
            f"config of the whole model, or of its text model alone with that model_type"
        )
    text = dict(inner)
    outer = config.get("tie_word_embeddings")
    said = outer if outer is not None else tied_by_default
    text["tie_word_embeddings"] = said
    text["tie_disputed"] = outer is None or inner.get("tie_word_embeddings", outer) != outer
    if "quantization_config" in config:
        text["quantization_config"] = config["quantization_config"]
    return text


def settle_names(
    *places: tuple[str, str],
) -> Callable[[ModelShape, Collection[str]], ModelShape]:
    """Returns an `adapt` that finds where the text model's tensors are, and whether it is tied.

    `places` are (layer prefix, head name) to try after what the config suggests: repositories saved
    by another class or version have the same model under other prefixes.
    """

    def adapt(shape: ModelShape, names: Collection[str]) -> ModelShape:
        for prefix, head in ((shape.layer_prefix, shape.head_name), *places):
            if f"{prefix.removesuffix('layers.')}embed_tokens.weight" in names:
                shape = replace(shape, layer_prefix=prefix, head_name=head)
                break
        return settle_tie(shape, names)

    return adapt
