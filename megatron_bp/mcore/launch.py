"""Puts block parallelism into the entry points that Megatron's pretraining scripts call.

A script parses its arguments, makes a configuration container and calls `pretrain`. Four names of
megatron.training are wrapped for that: the parser gets our flags, parsing mends what a kill left of
--load, validation runs between our `prepare` and `finish`, and `pretrain` gets our data, model and
forward step if a block-diffusion objective is asked for; else the call is passed on as it is.
Specified by tests/test_launch.py and tests/mcore/test_launch.py.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron_bp.mcore import adaptor, arguments, cpu, versions
from megatron_bp.mcore.checkpoints import mend_tracker

MARK = "_megatron_bp_stock"  # on what is installed: the function of Megatron that it wraps


def install() -> None:
    """Wraps Megatron's entry points in this process; a second call changes nothing.

    Call it before a script imports `pretrain`. Runs on the CPU if there is no CUDA device.
    Raises: RuntimeError for a Megatron whose entry points are not the known ones, or if the running
    script imported `pretrain` already.
    """
    if not torch.cuda.is_available():
        cpu.enable_cpu()
    cpu.use_shipped_dataset_helpers()
    versions.require_seams()
    versions.require_launch_seams()
    import megatron.training
    from megatron.training import arguments as stock_arguments
    from megatron.training import training

    stock = training.pretrain
    if hasattr(stock, MARK):
        return
    if getattr(sys.modules.get("__main__"), "pretrain", None) is stock:
        raise RuntimeError(
            "megatron_bp was installed after the script had imported pretrain, which would go on "
            "as stock Megatron; install it before the script's imports from megatron.training, or "
            "start the script with python -m megatron_bp.launch"
        )
    wrapped = _marked(functools.partial(_pretrain, stock), stock)
    megatron.training.pretrain = training.pretrain = wrapped
    for name, wrap in (
        ("add_megatron_arguments", _add_arguments),
        ("parse_args", _parse),
        ("validate_args", _validate),
    ):
        old = getattr(stock_arguments, name)
        setattr(stock_arguments, name, _marked(functools.partial(wrap, old), old))


def _marked(wrapped: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    functools.update_wrapper(wrapped, stock)
    setattr(wrapped, MARK, stock)
    return wrapped


def _add_arguments(stock: Callable[..., Any], parser: argparse.ArgumentParser) -> Any:
    return adaptor.add_arguments(stock(parser))


def _parse(stock: Callable[..., Any], *given: Any, **named: Any) -> argparse.Namespace:
    args: argparse.Namespace = stock(*given, **named)
    mended = mend_tracker(args) if args.bdlm_objective != "none" else ""
    if mended and args.rank == 0:
        print(mended, flush=True)
    return args


def _validate(
    stock: Callable[..., Any], args: argparse.Namespace, defaults: dict[str, Any] | None = None
) -> Any:
    config = arguments.config_from_args(args)
    arguments.prepare(args, config)
    result = stock(args, defaults or {})
    arguments.finish(args, config)
    return result


def _pretrain(stock: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Calls `pretrain` as the script does, with our data, model and forward step in the call.

    Raises: TypeError if the script calls `pretrain` as another version of it was called, or builds
    its model in a way that is not known; ImportError for a --spec that Megatron could not import.
    """
    from megatron.training import get_args, get_tokenizer
    from megatron.training.utils import print_rank_0

    call = _bind(stock, given, named)
    args, model = get_args(), call.arguments["cfg_container"].model
    config = arguments.config_from_args(args)
    if args.spec is not None and getattr(model, "transformer_layer_spec", args.spec) is None:
        raise ImportError(
            f"--spec {' '.join(args.spec)} does not import, and Megatron would train its default "
            "specification instead; correct it, or drop --spec"
        )
    print_rank_0(arguments.banner(args, config))
    if config.is_diffusion:
        _refuse_other_models(model, call.arguments.get("model_provider"))
        adaptor.refuse_after_start(args, get_tokenizer())
        adaptor.guard_writers(args)
        provider, forward_step = adaptor.parts(args, config, model)
        provider.is_distributed = True  # type: ignore[attr-defined]
        call.arguments["train_valid_test_dataset_provider"] = provider
        call.arguments["forward_step_func"] = forward_step
    return stock(*call.args, **call.kwargs)


def _bind(
    stock: Callable[..., Any], given: tuple[Any, ...], named: dict[str, Any]
) -> inspect.BoundArguments:
    """Returns the script's call by the names of `pretrain`'s parameters.

    Raises: TypeError for a script of another version. Up to 0.17 `pretrain` parsed the arguments
    itself; in 0.18 it took a function that builds the model in front of the model's type.
    """
    signature = inspect.signature(stock)
    try:
        call = signature.bind(*given, **named)
    except TypeError as error:
        problem = str(error)
    else:
        container, kind = (call.arguments[name] for name in ("cfg_container", "model_type"))
        if hasattr(container, "model") and not callable(kind):
            return call
        problem = f"cfg_container is {container!r} and model_type is {kind!r}"
    raise TypeError(
        f"the script calls pretrain as another version of Megatron-LM: {problem}; "
        f"megatron-core {versions.megatron_version()} has pretrain{signature}. Use the "
        "pretrain_gpt.py of that version, or examples/pretrain_bdlm.py"
    )


def _refuse_other_models(model: Any, model_provider: Any) -> None:
    from megatron.training.models.gpt import GPTModelConfig

    if model_provider is not None or type(model) is not GPTModelConfig:
        built = f"model_provider={model_provider}" if model_provider else type(model).__name__
        raise TypeError(
            f"the script builds its model from {built}; with --bdlm-objective it must be Megatron's"
            " GPTModelConfig (as in pretrain_gpt.py from Megatron-LM 0.19 on), which has the seams "
            "for attention and positions; use --bdlm-objective none, or that script"
        )
