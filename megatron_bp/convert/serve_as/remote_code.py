"""The small Python files that let transformers and servers open a model type they do not ship.

Each config and model class is the transformers class with the same layers under another name. The
caller gives the attention mask, as tools/block_filling.py does; decoding is the engine's business.
The config sets rope_theta itself: SGLang 0.5.23 runs on transformers 5.19, whose configs lose it,
and its SDAR model would take 10000.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_CONFIGURATION = '''"""Configuration of {architecture}."""

from transformers import {base}Config


class {config}({base}Config):
    """{base}Config under the model type {model_type}, with rope_theta where engines look for it."""

    model_type = "{model_type}"

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        if getattr(self, "rope_parameters", None):  # transformers 5 keeps it there alone
            self.rope_theta = float(self.rope_parameters["rope_theta"])
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


_LLADA2 = '''"""Configuration of LLaDA2MoeModelLM, which servers bring."""

from transformers import PretrainedConfig


class LLaDA2MoeConfig(PretrainedConfig):
    """The settings of config.json under the model type llada2_moe."""

    model_type = "llada2_moe"

    def __init__(self, **kwargs):
        for name in ("rope_scaling", "num_shared_experts"):
            kwargs.setdefault(name, None)
        super().__init__(**kwargs)
        if getattr(self, "rope_parameters", None):  # transformers 5 keeps it there alone
            self.rope_theta = float(self.rope_parameters["rope_theta"])
'''
LLADA2_FILES: Mapping[str, str] = {"configuration_llada2_moe.py": _LLADA2}
