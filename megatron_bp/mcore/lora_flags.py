"""What a run with adapters asks of its arguments. Imports no megatron.

Specified by tests/mcore/test_lora_flags.py.
"""

from __future__ import annotations

import argparse

from megatron_bp.config import BlockParallelConfig


def lora_base(args: argparse.Namespace) -> str:
    """Returns the folder of the base that adapters are put on; "" if none is given."""
    return str(args.pretrained_checkpoint or (args.load if args.finetune else "") or "")


def take_base(args: argparse.Namespace, config: BlockParallelConfig) -> None:
    """Moves the folder of the frozen base to `args.bdlm_lora_base`, where Megatron leaves it alone.

    What is left in `args.load` are adapters, which Megatron loads and saves as it does a model.
    """
    args.bdlm_lora_base = lora_base(args) if config.bdlm_lora_rank else ""
    if not config.bdlm_lora_rank:
        return
    if args.pretrained_checkpoint is None:
        args.load = None
    args.pretrained_checkpoint = None


def lora_problems(args: argparse.Namespace, config: BlockParallelConfig) -> list[str]:
    """Returns what adapters lack: a base, or layers that they fit."""
    if not config.bdlm_lora_rank:
        return []
    rank = f"--bdlm-lora-rank {config.bdlm_lora_rank}"
    problems = []
    if not lora_base(args):
        problems.append(
            f"{rank} needs the model to adapt; give its checkpoint as --pretrained-checkpoint "
            "FOLDER (and adapters to go on with as --load), or as --load FOLDER --finetune"
        )
    if args.num_experts:
        problems.append(
            f"{rank} does not fit experts; drop it, or drop --num-experts {args.num_experts}"
        )
    if args.transformer_impl != "local":
        problems.append(
            f"{rank} fits Megatron's own linear layers, not --transformer-impl "
            f"{args.transformer_impl}; use --transformer-impl local"
        )
    if args.ckpt_format != "torch_dist":
        problems.append(
            f"{rank} saves adapters alone, which --ckpt-format {args.ckpt_format} cannot; use "
            "--ckpt-format torch_dist"
        )
    return problems
