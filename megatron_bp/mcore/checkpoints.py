"""Keeps a checkpoint folder safe to restart from: what a kill leaves behind, and what would mix.

Megatron writes a checkpoint's tensors, then `.metadata`, then `metadata.json`, and then the
iteration into the folder's tracker file, which names the checkpoint that a restart loads. So a job
that is killed while it saves leaves the tracker on the checkpoint before, except twice: the tracker
itself is emptied before it is written, and a checkpoint that is written over is first complete,
then a mixture. This file mends the first and refuses the second. Knows files and flags only, and
imports no megatron. Specified by tests/mcore/test_checkpoints.py and tests/mcore/test_kill.py.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from megatron_bp.config import BlockParallelConfig

TRACKER = "latest_checkpointed_iteration.txt"


def mend_tracker(args: argparse.Namespace) -> str:
    """Returns what was mended in the folder of --load, for the log; "" if nothing was broken.

    A tracker that names no iteration (its writer was killed) makes Megatron end with exit code 0.
    It is written anew, at once whole, with the checkpoint that was completed last. Every process
    of a job may call this: all write the same.
    Raises: ValueError if this folder is not the one that the job saves to, or holds no checkpoint.
    """
    if args.load is None or not (tracker := Path(args.load) / TRACKER).is_file():
        return ""
    text = tracker.read_text().strip()
    if text.isdecimal() or text == "release":
        return ""
    complete = complete_iterations(Path(args.load))
    found = f"{tracker} reads {text!r}, which is no iteration (a job was killed while writing it)"
    if not complete:
        raise ValueError(
            f"{found}, and no checkpoint beside it is complete; remove this file to start anew"
        )
    latest = max(complete, key=lambda iteration: _finished(Path(args.load), iteration))
    if args.save is None or not is_same_folder(args.load, args.save):
        raise ValueError(
            f"{found}; the checkpoint that was completed last is {latest}, so write {latest} into "
            "this file, or give the folder as --save as well to have it written"
        )
    whole = tracker.with_name(f".{TRACKER}.{os.uname().nodename}.{os.getpid()}")
    with whole.open("w") as file:
        file.write(str(latest))
        file.flush()
        os.fsync(file.fileno())
    whole.replace(tracker)
    return f"{found}; wrote {latest}, the checkpoint that was completed last"


def complete_iterations(folder: Path) -> list[int]:
    """Returns the iterations of the complete torch_dist checkpoints under `folder`, ascending."""
    names = (path.name.removeprefix("iter_") for path in folder.glob("iter_*"))
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return [iteration for iteration in numbers if _is_complete(iteration_folder(folder, iteration))]


def iteration_folder(folder: Path, iteration: int) -> Path:
    """Returns where Megatron puts the checkpoint of an iteration."""
    return folder / f"iter_{iteration:07d}"


def checkpoint_problems(args: argparse.Namespace, config: BlockParallelConfig) -> list[str]:
    """Returns which saves could not be resumed from, or would not be what was asked for."""
    problems = []
    if args.async_save and not args.use_persistent_ckpt_worker:
        problems.append(
            "--async-save without --use-persistent-ckpt-worker is switched off by Megatron; add "
            "--use-persistent-ckpt-worker, or drop --async-save"
        )
    later = _overwritten(args)
    if later:
        problems.append(
            f"--ckpt-step {args.ckpt_step} would write over the later checkpoint(s) "
            f"{', '.join(map(str, later))} of --save {args.save}, whose {TRACKER} names one of "
            "them: a restart after a kill would load a mixture of two runs; use another --save, "
            f"or write {args.ckpt_step} into that file and drop --ckpt-step"
        )
    return problems


def optimizer_problems(args: argparse.Namespace, saved: argparse.Namespace) -> list[str]:
    """Returns why a run cannot load the optimizer's state of the checkpoint of --load, if so.

    `saved` are the arguments in the checkpoint; empty if it has none.
    """
    if args.finetune or args.no_load_optim or getattr(saved, "no_save_optim", True):
        return []
    if args.use_distributed_optimizer != saved.use_distributed_optimizer:
        what, remedy = ("without", "drop") if args.use_distributed_optimizer else ("with", "add")
        return [
            f"the checkpoint of --load {args.load} was saved {what} --use-distributed-optimizer, "
            f"which keeps its state in another form; {remedy} --use-distributed-optimizer, or "
            "start with new moments: --no-load-optim"
        ]
    degrees = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    old, new = ([getattr(one, degree) for degree in degrees] for one in (saved, args))
    reshardable = getattr(saved, "dist_ckpt_optim_fully_reshardable", False)
    if not args.use_distributed_optimizer or reshardable or old == new:
        return []
    return [
        f"the checkpoint of --load {args.load} was saved at TP {old[0]} x PP {old[1]} without "
        "--dist-ckpt-optim-fully-reshardable, so its optimizer state follows data, context and "
        f"block degrees only; use --tensor-model-parallel-size {old[0]} "
        f"--pipeline-model-parallel-size {old[1]} (and add --dist-ckpt-optim-fully-reshardable for "
        "the next checkpoint), or start with new moments: --no-load-optim"
    ]


def is_same_folder(one: str, other: str) -> bool:
    """Returns whether two paths name the same folder, which need not exist."""
    return Path(one).resolve() == Path(other).resolve()


def _overwritten(args: argparse.Namespace) -> list[int]:
    """Complete checkpoints in --save that this run reaches again, if the tracker names one."""
    if args.save is None or args.ckpt_step is None:
        return []
    tracker = Path(args.save) / TRACKER
    text = tracker.read_text().strip() if tracker.is_file() else ""
    if not text.isdecimal() or int(text) <= args.ckpt_step:
        return []
    return [step for step in complete_iterations(Path(args.save)) if step > args.ckpt_step]


def _is_complete(folder: Path) -> bool:
    try:
        described = json.loads((folder / "metadata.json").read_text())
    except (FileNotFoundError, ValueError):
        return False
    return "sharded_backend" in described and (folder / ".metadata").is_file()


def _finished(folder: Path, iteration: int) -> float:
    return (iteration_folder(folder, iteration) / "metadata.json").stat().st_mtime
