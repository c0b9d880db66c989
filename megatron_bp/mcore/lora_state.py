"""A run with adapters: the base is loaded and frozen, adapters are drawn, and saved alone.

A starts random and B at zero, so that the first step is the base model's. Checkpoints of such a
run hold adapters only, and a resumed run reads the base again. Specified by
tests/mcore/test_lora.py and test_lora_runs.py.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.training.models.gpt import GPTModelConfig
from torch import nn

from megatron_bp.mcore.lora import AdaptedRow, Adapter, Lora, adapted_spec, is_adapter


def use_lora(config: GPTModelConfig, lora: Lora, base: str) -> None:
    """Makes Megatron build the model of `config` with adapters on the checkpoint folder `base`."""
    stock: Any = config.transformer_layer_spec

    def layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
        return adapted_spec(stock(config, vp_stage), lora)

    config.transformer_layer_spec = layer_spec
    config.pre_wrap_hooks.append(functools.partial(start_adapters, base=base))


def start_adapters(models: list[Any], base: str) -> list[Any]:
    """Returns the models with the base loaded and frozen and adapters drawn (a pre-wrap hook)."""
    for model in models:
        load_base(model, base)
        freeze_base(model)
        draw_adapters(model)
    return models


def freeze_base(model: Any) -> None:
    """Lets only adapters be trained, saved and loaded."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    if getattr(model, "pre_process", False):
        # Recomputation keeps gradients only of what hangs on an input that needs one.
        model.embedding.register_forward_hook(lambda module, given, out: out.requires_grad_())
    whole = model.sharded_state_dict
    model.sharded_state_dict = lambda *args, **kwargs: {
        key: value for key, value in whole(*args, **kwargs).items() if is_adapter(key)
    }
    model.register_load_state_dict_post_hook(_base_is_not_missing)


def draw_adapters(model: Any) -> None:
    """Sets every A uniform in +-1 / sqrt(in), as PEFT does, the same in every layout."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for layer in model.decoder.layers:
        for name, module in layer.named_modules():
            if not isinstance(module, Adapter):
                continue
            seed = zlib.crc32(f"{module.lora.seed} {layer.layer_number} {name}".encode())
            whole = torch.empty(module.lora.rank, module.input_size)
            bound = module.input_size**-0.5
            whole.uniform_(-bound, bound, generator=torch.Generator().manual_seed(seed))
            is_split = isinstance(module, AdaptedRow)
            module.lora_a.data.copy_(whole.chunk(size, 1)[rank] if is_split else whole)


def load_base(model: Any, base: str) -> None:
    """Reads everything but the adapters from the newest checkpoint under `base`."""
    from megatron.training.checkpointing import (
        get_checkpoint_name,
        get_checkpoint_tracker_filename,
        read_metadata,
    )

    iteration, release = read_metadata(get_checkpoint_tracker_filename(base))
    folder = get_checkpoint_name(base, iteration, release, return_base_dir=True)
    metadata = dict(dist_checkpointing.load_content_metadata(folder) or {})
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    wanted = model.sharded_state_dict(metadata=metadata)
    wanted = {key: value for key, value in wanted.items() if not is_adapter(key)}
    keys = model.load_state_dict(dist_checkpointing.load(wanted, folder), strict=False)
    missing = [key for key in keys.missing_keys if not is_adapter(key)]
    assert not missing, f"{folder} was loaded without {missing}"


def _base_is_not_missing(model: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if is_adapter(key)]
