"""Starts Megatron's `pretrain` with everything of this package in its place.

The only file that knows the order of a run: flags, checks, Megatron's arguments, model, data,
forward step. Specified by tests/mcore/test_pretrain_ar.py and tests/mcore/test_pretrain_bdlm.py.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_bp.config import BlockParallelConfig, list_problems
from megatron_bp.mcore import arguments, cpu, gloo, refusals, versions
from megatron_bp.mcore.checkpoints import mend_tracker, optimizer_problems
from megatron_bp.mcore.writer_watch import shield_helpers, watch_writer


def pretrain_bdlm() -> None:
    """Runs one training job from the command line, and leaves the process group.

    Raises: ValueError for arguments that cannot be met, RuntimeError for a Megatron without our
    seams.
    """
    train()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def train() -> None:
    """Runs one training job from the command line; raises as `pretrain_bdlm`."""
    if not torch.cuda.is_available():
        cpu.enable_cpu()
    cpu.use_shipped_dataset_helpers()
    versions.require_seams()
    args, config = parse()
    if config.is_diffusion:
        guard_writers(args)

    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )

    model_config = gpt_config_from_args(args)
    container = pretrain_cfg_container_from_args(args, model_config)
    provider, forward_step = parts(args, config, model_config)
    # Every rank takes part in building the datasets.
    provider.is_distributed = True  # type: ignore[attr-defined]
    pretrain(
        cfg_container=container,
        train_valid_test_dataset_provider=provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


def guard_writers(args: argparse.Namespace) -> None:
    """Keeps the helpers that write checkpoints alive as long as this rank; call it before Megatron
    initialises."""
    if args.save and args.async_strategy == "mcore":
        if args.exit_signal_handler:
            shield_helpers(args.exit_signal, args.async_save)
        if args.async_save:
            watch_writer()


def parts(
    args: argparse.Namespace, config: BlockParallelConfig, model_config: Any
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the dataset provider and the forward step of a run.

    Puts block diffusion into `model_config`, if the objective is one.
    """
    from megatron.core import parallel_state
    from megatron.training import get_tokenizer
    from megatron.training.utils import is_first_or_last_pipeline_stage

    from megatron_bp.mcore import dataset

    gloo.use_gloo_on_gpus(args)
    tokenizer = get_tokenizer()
    # Packed documents shape the layout, so every pipeline stage must see the sample's tokens.
    on_every_stage = config.is_diffusion and args.reset_attention_mask

    def is_built_here(vp_stage: int | None) -> bool:
        return parallel_state.get_tensor_model_parallel_rank() == 0 and bool(
            on_every_stage or is_first_or_last_pipeline_stage(vp_stage)
        )

    if not config.is_diffusion:
        from megatron_bp.mcore.next_token import forward_step

        def clean(num_samples: Sequence[int | None], vp_stage: int | None = None) -> list[Any]:
            here = functools.partial(is_built_here, vp_stage)
            return dataset.build_datasets(args, tokenizer, num_samples, here)

        return clean, forward_step

    from megatron_bp.mcore.forward_step import DiffusionForwardStep
    from megatron_bp.mcore.model import use_block_diffusion
    from megatron_bp.mcore.throughput import count_useful_work

    use_block_diffusion(model_config)
    count_useful_work(config)
    if config.bdlm_lora_rank:
        from megatron_bp.mcore.lora import Lora
        from megatron_bp.mcore.lora_state import use_lora

        adapters = Lora(config.bdlm_lora_rank, config.bdlm_lora_alpha, args.seed)
        use_lora(model_config, adapters, args.bdlm_lora_base)
    rules = corruption_rules(args, config, tokenizer)

    def corrupted(num_samples: Sequence[int | None], vp_stage: int | None = None) -> list[Any]:
        here = functools.partial(is_built_here, vp_stage)
        return dataset.build_corrupted_datasets(args, tokenizer, num_samples, here, rules)

    return corrupted, DiffusionForwardStep(args, config, rules, vocabulary_size(args, tokenizer))


def parse() -> tuple[argparse.Namespace, BlockParallelConfig]:
    """Returns Megatron's arguments, validated and made global, and our knobs.

    The steps of Megatron's own `parse_and_validate_args`, with ours around its validation.
    """
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpointing import load_args_from_checkpoint
    from megatron.training.global_vars import get_tokenizer, set_global_variables
    from megatron.training.utils import print_rank_0

    args = parse_args(add_arguments)
    mended = mend_tracker(args) if args.bdlm_objective != "none" else ""
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    config = arguments.config_from_args(args)
    arguments.prepare(args, config)
    validate_args(args, {})
    arguments.finish(args, config)
    set_global_variables(args)
    if config.is_diffusion:
        refuse_after_start(args, get_tokenizer())
    print_rank_0("\n".join(filter(None, (arguments.banner(args, config), mended))))
    return args, config


def refuse_after_start(args: argparse.Namespace, tokenizer: Any) -> None:
    """Returns if the tokenizer and the checkpoint fit the arguments.

    Raises: ValueError that lists every problem.
    """
    problems = refusals.vocabulary_problems(
        args.mask_token_id, vocabulary_size(args, tokenizer), special_ids(tokenizer)
    )
    if args.load is not None:
        saved = saved_arguments(args.load, args.ckpt_step)
        problems += refusals.resume_problems(args, saved) + optimizer_problems(args, saved)
    if problems:
        raise ValueError(list_problems(problems))


def vocabulary_size(args: argparse.Namespace, tokenizer: Any) -> int:
    """Returns the number of token ids without Megatron's padding."""
    return int(args.vocab_size or tokenizer.vocab_size)


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Returns the ids of the tokenizer's special tokens that are not a mask, by name."""
    found = {}
    for name in ("eod", "eos", "bos", "pad", "unk"):
        try:
            value = getattr(tokenizer, name)
        except (AttributeError, NotImplementedError, KeyError, TypeError, IndexError):
            continue  # each tokenizer library lacks other ones and says so in its own way
        if isinstance(value, int) and value >= 0:
            found[name] = value
    return found


def saved_arguments(folder: str, step: int | None) -> argparse.Namespace:
    """Returns the arguments saved in a checkpoint under `folder`; empty if there are none.

    `step` is Megatron's --ckpt-step; without one the latest checkpoint is read.
    """
    from megatron.core import dist_checkpointing
    from megatron.training.checkpointing import (
        get_checkpoint_name,
        get_checkpoint_tracker_filename,
        read_metadata,
    )

    try:
        iteration, release = read_metadata(get_checkpoint_tracker_filename(folder))
    except FileNotFoundError:
        return argparse.Namespace()
    if step is not None:
        iteration, release = step, False
    path = get_checkpoint_name(folder, iteration, release, return_base_dir=True)
    if not dist_checkpointing.check_is_distributed_checkpoint(path):
        return argparse.Namespace()
    saved = dist_checkpointing.load_common_state_dict(path).get("args")
    return saved if isinstance(saved, argparse.Namespace) else argparse.Namespace()


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Returns Megatron's parser with our flags, CPU defaults and a working --help."""
    parser = arguments.add_block_parallel_arguments(parser)
    if not torch.cuda.is_available():
        parser.set_defaults(**cpu.CPU_FLAG_DEFAULTS)
    for action in parser._actions:
        # Some help texts of Megatron hold a bare percent sign, at which argparse's --help fails.
        try:
            str(action.help) % vars(action)
        except (ValueError, TypeError, KeyError):
            action.help = str(action.help).replace("%", "%%")
    return parser


def corruption_rules(args: argparse.Namespace, config: BlockParallelConfig, tokenizer: Any) -> Any:
    """Returns the rules by which this run corrupts its samples."""
    from megatron_bp.mcore.choices import objective_of
    from megatron_bp.mcore.dataset import CorruptionRules

    return CorruptionRules(
        objective=objective_of(args, config),
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        noise_seed=args.bdlm_noise_seed,
        end_of_document=int(tokenizer.eod),
        split_documents=args.reset_attention_mask,
        end_is_target=not args.eod_mask_loss,
        vocab_size=vocabulary_size(args, tokenizer),
    )
