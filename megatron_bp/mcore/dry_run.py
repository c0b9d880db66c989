"""Says what a run would do on a cluster, from its flags alone: ranks, groups, memory, bytes.

Parses and validates the very flags of `examples/pretrain_bdlm.py` with Megatron's parser and our
checks, as on GPUs, but starts no process group and needs no device. The numbers are those of
`layout.memory` and `layout.traffic`. Specified by tests/mcore/test_dry_run.py.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import product

import torch

from megatron_bp.config import BlockParallelConfig, list_problems
from megatron_bp.layout.memory import MemoryBytes, Stage, rank_memory
from megatron_bp.layout.run_shape import Recompute, Run
from megatron_bp.layout.traffic import step_traffic
from megatron_bp.mcore import arguments, cpu, refusals
from megatron_bp.mcore.dry_run_shape import Cluster, approximations, run_of, wishes

GIB = 2**30
PARTS = (
    ("parameters", "weights"),
    ("gradients", "gradients"),
    ("optimizer", "optimizer"),
    ("activations", "activations"),
    ("gathered_kv", "attention buffers: clean K/V kept"),
    ("workspace", "attention buffers and recomputed layer, one at a time"),
    ("logits", "loss: logits, a chunk at a time, and a tied table's gradient"),
)


@dataclasses.dataclass(frozen=True)
class Report:
    """What would happen, and why it cannot, if so."""

    text: str
    problems: tuple[str, ...]


def dry_run(flags: Sequence[str], cluster: Cluster) -> Report:
    """Returns the report of a run with these flags on this cluster.

    Raises: ValueError for flags that a run would refuse; SystemExit for unknown ones.
    """
    args, config, notes = validated(flags, cluster)
    if not config.is_diffusion:
        raise ValueError("a dry run needs a block-diffusion objective; use --bdlm-objective ...")
    runs = [run_of(args, config, wish) for wish in wishes(args, config)]
    run = next((run for run in runs if fits(run, cluster)), runs[-1])
    lines = [
        f"dry run of {cluster.num_gpus} GPUs, {cluster.gpus_per_node} a node: nothing is started",
        arguments.banner(args, config),
        "groups (global ranks):",
        *(f"  {line}" for line in group_lines(args, cluster)),
        *memory_lines(run, cluster),
        *traffic_lines(run),
        *(f"note: {note}" for note in (*notes, *approximations(args, config))),
    ]
    problems = []
    if not fits(run, cluster):
        needed = peak(run).total / GIB + cluster.reserve_gib
        problems.append(
            f"a GPU would need {needed:.1f} GiB (with {cluster.reserve_gib:g} GiB in reserve) and "
            f"has {cluster.memory_gib:g}; {remedy(run, cluster)}"
        )
    return Report("\n".join(lines), tuple(problems))


def validated(
    flags: Sequence[str], cluster: Cluster
) -> tuple[argparse.Namespace, BlockParallelConfig, list[str]]:
    """Returns the arguments as a run on GPUs has them, our knobs, and what is not there yet.

    Checkpoint folders need not exist: a launch is planned before its model is converted.
    """
    from megatron.training.arguments import add_megatron_arguments, validate_args

    if not torch.cuda.is_available():
        cpu.enable_cpu()  # validation asks for a device's properties
    parser = argparse.ArgumentParser("dry_run.py", allow_abbrev=False)
    parser = arguments.add_block_parallel_arguments(add_megatron_arguments(parser))
    args = parser.parse_args([*flags])
    args.rank, args.world_size, args.local_rank = 0, cluster.num_gpus, 0
    config = arguments.config_from_args(args)
    if args.use_checkpoint_args:
        raise ValueError(
            "--use-checkpoint-args reads the model from a checkpoint, which a dry run does not "
            "open; give the model's flags (a conversion writes them to megatron_flags.sh)"
        )
    notes = []
    if config.is_diffusion and not config.bdlm_lora_rank:
        notes = refusals.load_problems(args, config)
        if notes:
            args.load = args.pretrained_checkpoint = None
    arguments.prepare(args, config)
    with contextlib.redirect_stdout(io.StringIO()):  # Megatron lists every argument
        validate_args(args, {})
    arguments.finish(args, config)
    _set_vocabulary(args)
    if config.is_diffusion and not 0 <= config.mask_token_id < args.padded_vocab_size:
        problems = refusals.vocabulary_problems(config.mask_token_id, args.padded_vocab_size, {})
        raise ValueError(list_problems(problems))
    return args, config, notes


def _set_vocabulary(args: argparse.Namespace) -> None:
    """The padded size, as Megatron makes it, without a tokenizer."""
    if args.padded_vocab_size:
        return
    if not args.vocab_size:
        raise ValueError(
            "the vocabulary's size is in the tokenizer, which a dry run does not open; give "
            "--padded-vocab-size (a conversion writes it to megatron_flags.sh) or --vocab-size"
        )
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple


def group_lines(args: argparse.Namespace, cluster: Cluster) -> list[str]:
    """One line for each kind of group, from Megatron's own generator of ranks."""
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    context, shards = args.context_parallel_size, args.bp_clean_shards
    ranks = RankGenerator(
        tp=args.tensor_model_parallel_size,
        ep=1,
        dp=args.data_parallel_size,
        pp=args.pipeline_model_parallel_size,
        cp=context,
        order=order,
    )
    of_context = ranks.get_ranks("cp")
    kinds = [("tensor", ranks.get_ranks("tp")), ("context (one sample)", of_context)]
    if 1 < shards < context:
        adjacent = [
            group[first : first + shards]
            for group in of_context
            for first in range(0, context, shards)
        ]
        kinds.append(("clean shards", adjacent))
    kinds += [("pipeline", ranks.get_ranks("pp")), ("data", ranks.get_ranks("dp"))]
    return [_group_line(name, groups, cluster.gpus_per_node) for name, groups in kinds]


def _group_line(name: str, groups: list[list[int]], gpus_per_node: int) -> str:
    size = len(groups[0])
    if size == 1:
        return f"{name}: 1 rank each"
    nodes = max(len({rank // gpus_per_node for rank in group}) for group in groups)
    where = "within a node" if nodes == 1 else f"over {nodes} nodes"
    shown = " ".join(str(group).replace(" ", "") for group in groups)
    return f"{name}: {len(groups)} of {size} ranks, {where}: {shown}"


def peak(run: Run) -> MemoryBytes:
    """The memory of the fuller end of the pipeline."""
    return max((rank_memory(run, stage) for stage in Stage), key=lambda memory: memory.total)


def fits(run: Run, cluster: Cluster) -> bool:
    """Whether every GPU has the memory."""
    return peak(run).total <= cluster.usable_bytes


def memory_lines(run: Run, cluster: Cluster) -> list[str]:
    """The parts of the fullest GPU's memory."""
    memory, shown = peak(run), str(run.policy.recompute).replace("_", " ")
    lines = [f"memory of the fullest GPU in GiB (estimate; recompute: {shown}):"]
    for field, name in PARTS:
        lines.append(f"  {getattr(memory, field) / GIB:7.2f}  {name}")
    lines.append(f"  {cluster.reserve_gib:7.2f}  reserve for CUDA, NCCL and fragments")
    total = memory.total / GIB + cluster.reserve_gib
    return [*lines, f"  {total:7.2f}  of {cluster.memory_gib:g}"]


def traffic_lines(run: Run) -> list[str]:
    """What one GPU sends in a step, by collective."""
    collectives = step_traffic(run)
    lines = ["sent by a GPU in one step, in GiB:"]
    for one in sorted(collectives, key=lambda collective: -collective.step_bytes):
        size = f"{one.step_bytes / GIB:9.3f}"
        lines.append(f"  {size}  {one.name}: {one.calls} times over {one.size} ranks ({one.axis})")
    total = sum(one.step_bytes for one in collectives) / GIB
    return [*lines, f"  {total:9.3f}  in all"]


def remedy(run: Run, cluster: Cluster) -> str:
    """Flags that would fit: on as few GPUs as these, else on twice as many, and so on."""
    for factor in (1, 2, 4, 8):
        num_gpus = cluster.num_gpus * factor
        found = [other for other in splits(run, num_gpus) if fits(other, cluster)]
        if found:
            best = min(found, key=_sent)
            where = "" if factor == 1 else f" on {num_gpus} GPUs"
            return f"it would fit{where} with {flags_of(best)}"
    return "no split of up to 8 times as many GPUs fits; use a shorter --seq-length"


def _sent(run: Run) -> float:
    return sum(one.step_bytes for one in step_traffic(run))


def splits(run: Run, num_gpus: int) -> Iterator[Run]:
    """The run with other degrees and full recompute, wherever these can be laid out."""
    sizes = [2**power for power in range(num_gpus.bit_length()) if num_gpus % 2**power == 0]
    again = dataclasses.replace(run.policy, recompute=Recompute.FULL, keep_gathered=False)
    old = run.topology
    for tensor, context, pipeline in product(sizes[:4], sizes, sizes):
        data, left = divmod(num_gpus, tensor * context * pipeline)
        if left or not data:
            continue
        shards = context if old.shards == old.context else min(old.shards, context)
        degrees = {"tensor": tensor, "context": context, "shards": shards}
        with contextlib.suppress(ValueError):  # does not divide the model or the batch
            topology = dataclasses.replace(old, **degrees, pipeline=pipeline, data=data)
            yield dataclasses.replace(run, topology=topology, policy=again)


def flags_of(run: Run) -> str:
    """The flags of a run's degrees and recomputation."""
    topology = run.topology
    words = [f"--tensor-model-parallel-size {topology.tensor}"]
    if topology.sequence_parallel:
        words.append("--sequence-parallel")
    words.append(f"--context-parallel-size {topology.shards}")
    if topology.block_owned:
        words.append(f"--block-parallel-size {topology.context}")
    words.append(f"--pipeline-model-parallel-size {topology.pipeline}")
    words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    return " ".join(words)


def main(cluster: Cluster, flags: Sequence[str]) -> int:
    """Prints the report; returns 0 if the run would fit, else 1."""
    try:
        report = dry_run(flags, cluster)
    except ValueError as error:
        print(f"REFUSED: {error}", file=sys.stderr)
        return 1
    except AssertionError as error:  # how Megatron refuses, often without a word
        asked = traceback.extract_tb(error.__traceback__)[-1].line
        print(f"REFUSED by Megatron: {error} ({asked})", file=sys.stderr)
        return 1
    print(report.text)
    for problem in report.problems:
        print(f"REFUSED: {problem}", file=sys.stderr)
    if report.problems:
        return 1
    print("OK: it fits")
    return 0
