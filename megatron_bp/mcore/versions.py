"""Answers "is the seam there" for every place of Megatron-Core that megatron_bp hangs on to.

The only file that knows version numbers; callers ask for seams and never compare versions.
Specified by tests/mcore/test_versions.py.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

TESTED = "megatron-core 0.19.2"


def megatron_version() -> str:
    """Returns the version of the installed Megatron-Core."""
    import megatron.core

    return str(megatron.core.__version__)


def _folder() -> str:
    import megatron.core

    return str(Path(megatron.core.__file__).parent)


def missing_seams() -> list[str]:
    """Returns one sentence for each seam of the installed Megatron-Core that is not as expected."""
    problems: list[str] = []
    for check in (_core_seams, _training_seams):
        try:
            problems += check()
        except ImportError as error:
            problems.append(f"cannot import a module that holds a seam: {error}")
    return problems


def require_seams() -> None:
    """Returns if every seam is there.

    Raises: RuntimeError that lists all seams which are not.
    """
    problems = missing_seams()
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise RuntimeError(
            f"megatron-core {megatron_version()} lacks what megatron_bp uses:\n{lines}\n"
            f"It was imported from {_folder()} (a checkout's own megatron comes before the "
            f"installed one). Use a version that has it; tested with {TESTED}."
        )


def require_launch_seams() -> None:
    """Returns if the entry points that a pretraining script calls are those the launcher knows.

    Raises: RuntimeError that lists all which are not.
    """
    problems = missing_launch_seams()
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise RuntimeError(
            f"the entry points of megatron-core {megatron_version()} are not the ones that "
            f"megatron_bp.launch knows:\n{lines}\nUse {TESTED}, or train with "
            "examples/pretrain_bdlm.py, which needs fewer of them."
        )


def missing_launch_seams() -> list[str]:
    """Returns one sentence for each entry point of a pretraining script that is not as known."""
    try:
        from megatron.training import argument_utils, arguments, training
    except ImportError as error:
        return [f"cannot import a module that holds an entry point: {error}"]
    known: tuple[tuple[Any, str, tuple[str, ...]], ...] = (
        (
            training,
            "pretrain",
            (
                "cfg_container",
                "train_valid_test_dataset_provider",
                "model_type",
                "forward_step_func",
                "model_provider",
            ),
        ),
        (arguments, "add_megatron_arguments", ("parser",)),
        (arguments, "parse_args", ("extra_args_provider",)),
        (arguments, "validate_args", ("args", "defaults")),
        (arguments, "parse_and_validate_args", ("extra_args_provider",)),
        (argument_utils, "gpt_config_from_args", ("args",)),
        (argument_utils, "pretrain_cfg_container_from_args", ("args", "model_cfg")),
    )
    problems = []
    for module, name, first in known:
        if not hasattr(module, name):
            problems.append(f"{module.__name__} has no {name}")
            continue
        found = tuple(inspect.signature(getattr(module, name)).parameters)
        if found[: len(first)] != first:
            problems.append(
                f"{module.__name__}.{name}({', '.join(found)}) does not begin with "
                f"({', '.join(first)})"
            )
    return problems


def _core_seams() -> list[str]:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.parallel_state import initialize_model_parallel
    from megatron.core.transformer.attention import SelfAttentionSubmodules
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    return [
        *_parameters(
            GPTModel.forward,
            "packed_seq_params",
            "padding_mask",
            "output_processor",
            "output_processor_context",
        ),
        *_parameters(RotaryEmbedding.get_rotary_seq_len, "packed_seq_params"),
        *_parameters(RotaryEmbedding.get_emb, "max_seq_len"),
        *_parameters(initialize_model_parallel, "hierarchical_context_parallel_sizes"),
        *_parameters(TransformerLayer._forward_mlp, "padding_mask"),
        *_fields(PackedSeqParams, "qkv_format", "max_seqlen_q", "max_seqlen_kv", "cp_group"),
        *_fields(TransformerLayerSubmodules, "self_attention", "self_attn_bda"),
        *_fields(SelfAttentionSubmodules, "core_attention"),
        *_te_seams(),
    ]


def _te_seams() -> list[str]:
    from megatron.core.extensions import transformer_engine as extension

    if not extension.HAVE_TE:
        return []
    attention = extension.TEDotProductAttention
    return [
        *_parameters(attention.__init__, "softmax_scale", "cp_comm_type"),
        *_parameters(attention.forward, "packed_seq_params", "num_splits"),
    ]


def _training_seams() -> list[str]:
    from megatron.training import arguments, global_vars, pretrain
    from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

    return [
        *_parameters(
            pretrain,
            "cfg_container",
            "train_valid_test_dataset_provider",
            "model_type",
            "forward_step_func",
        ),
        *_parameters(arguments.parse_args, "extra_args_provider"),
        *_parameters(arguments.validate_args, "args", "defaults"),
        *_parameters(global_vars.set_global_variables, "args"),
        *_parameters(default_layer_spec, "config", "vp_stage"),
        *_fields(GPTModelConfig, "transformer_layer_spec", "pre_wrap_hooks"),
    ]


def _parameters(function: Callable[..., Any], *names: str) -> list[str]:
    present = inspect.signature(function).parameters
    where = f"{function.__module__}.{function.__qualname__}"
    return [f"{where} has no parameter {name}" for name in names if name not in present]


def _fields(cls: type, *names: str) -> list[str]:
    present = {field.name for field in dataclasses.fields(cls)}
    where = f"{cls.__module__}.{cls.__qualname__}"
    return [f"{where} has no field {name}" for name in names if name not in present]
