"""The small Python files that let transformers and servers open a model type they do not ship.

Each config and model class is the transformers class with the same layers under another name. The
caller gives the attention mask, as tools/block_filling.py does; decoding is the engine's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_CONFIGURATION = '''"""Configuration of {architecture}."""

from transformers import {base}Config


class {config}({base}Config):
    """{base}Config under the model type {model_type}."""

    model_type = "{model_type}"
'''

_MODELING = '''"""{architecture}: {base}'s layers and names; attention_mask is [batch, 1, q, k]."""

from transformers import {base}ForCausalLM

from .configuration_{model_type} import {config}


class {architecture}({base}ForCausalLM):
    """{base}ForCausalLM that takes a block-diffusion config."""

    config_class = {config}
'''


def remote_files(models: Iterable[tuple[str, str, str]]) -> Mapping[str, str]:
    """Returns file name -> text for (architecture, model type, transformers base) triples."""
    files = {}
    for architecture, model_type, base in models:
        names = {
            "architecture": architecture,
            "model_type": model_type,
            "base": base,
            "config": f"{architecture.removesuffix('ForCausalLM')}Config",
        }
        files[f"configuration_{model_type}.py"] = _CONFIGURATION.format(**names)
        files[f"modeling_{model_type}.py"] = _MODELING.format(**names)
    return files
