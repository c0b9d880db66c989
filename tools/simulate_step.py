#!/usr/bin/env python
"""Simulates one training step on every rank: overlap, stragglers, imbalance, bubbles.

    python tools/simulate_step.py --model nemotron-14b --length 262144 --context 8 --shards 8
    python tools/simulate_step.py --model nemotron-14b --length 1048576 --tensor 2 --context 64 \\
        --shards 64 --pipeline 2 --data 16 --global-batch 64 --by-node --slow 1234:1.2 \\
        --trace step.json --plot step.png --ranks 0,63,1234

Prints seconds of computing, exposed and waiting time and bytes sent. `--trace` is read by
https://ui.perfetto.dev. Topologies as tools/plan_topology.py finds them.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.run_shape import Policy, Recompute, Run, Topology
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import HARDWARE, hardware_named
from megatron_bp.planning.predict import Schedule, predict
from megatron_bp.planning.shapes import MODELS, model_named
from megatron_bp.planning.simulate import simulate_step, summary
from megatron_bp.planning.simulate_mesh import Slow
from megatron_bp.planning.simulate_program import Scenario
from megatron_bp.planning.trace import write_trace
from megatron_bp.planning.workload import OBJECTIVES, Workload

DEGREES = ("tensor", "context", "shards", "pipeline", "virtual", "expert", "data")


def slow_rank(text: str) -> Slow:
    """RANK:COMPUTE or RANK:COMPUTE:LINK, factors of time."""
    rank, *factors = text.split(":")
    if not 1 <= len(factors) <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not RANK:COMPUTE[:LINK], as 3:1.2 or 3:1:2")
    return Slow(int(rank), *(float(factor) for factor in factors))


def rank_list(text: str) -> tuple[int, ...]:
    """Comma-separated global ranks."""
    return tuple(int(part) for part in text.split(","))


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--objective", choices=list(OBJECTIVES), default="standard")
    parser.add_argument("--length", type=int, required=True, help="clean tokens of a sample")
    parser.add_argument("--block-size", type=int, default=32, help="tokens")
    parser.add_argument("--micro-batch", type=int, default=1, help="samples at a time")
    parser.add_argument("--global-batch", type=int, default=0, help="samples a step (data degree)")
    for name in DEGREES:
        parser.add_argument(f"--{name}", type=int, default=1, help="parallel degree")
    parser.add_argument("--baseline", action="store_true", help="conventional context parallelism")
    parser.add_argument(
        "--ownership", type=Ownership, choices=list(Ownership), default=Ownership.DUAL_END
    )
    parser.add_argument(
        "--recompute", type=Recompute, choices=list(Recompute), default=Recompute.NONE
    )
    parser.add_argument("--regather", action="store_true", help="gather keys again in backward")
    parser.add_argument(
        "--schedule", type=Schedule, choices=list(Schedule), default=Schedule.OVERLAPPED
    )
    parser.add_argument("--by-node", action="store_true", help="gather keys by node")
    parser.add_argument("--gpu", choices=list(HARDWARE), default="h200")
    parser.add_argument("--node-size", type=int, default=8, help="ranks of a node")
    parser.add_argument("--slow", type=slow_rank, action="append", default=[], metavar="R:C[:L]")
    parser.add_argument("--ranks", type=rank_list, default=(0,), help="ranks to trace and draw")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace (JSON)")
    parser.add_argument("--plot", type=Path, help="write a PNG")
    return parser


def scenario_of(args: argparse.Namespace) -> Scenario:
    """The scenario that the arguments describe."""
    degrees: dict[str, Any] = {name: getattr(args, name) for name in DEGREES}
    topology = Topology(**degrees, block_owned=not args.baseline, ownership=args.ownership)
    cluster = Cluster(hardware_named(args.gpu), args.node_size)
    batch = args.global_batch or args.micro_batch * topology.data
    work = Workload(
        model_named(args.model),
        args.objective,
        args.length,
        args.block_size,
        topology.world,
        batch,
        cluster,
    )
    policy = replace(Policy(), recompute=args.recompute, keep_gathered=not args.regather)
    run = Run(work.model, work.batch(args.micro_batch), topology, policy)
    return Scenario(run, cluster, args.schedule, args.by_node, tuple(args.slow))


def main(argv: list[str]) -> int:
    """Runs the command; 2 for arguments that cannot be met."""
    args = make_parser().parse_args(argv)
    try:
        scenario = scenario_of(args)
        begin = time.process_time()
        line = simulate_step(scenario, args.ranks)
    except ValueError as error:
        print(f"simulate_step: {error}", file=sys.stderr)
        return 2
    degrees = " ".join(f"{name} {getattr(args, name)}" for name in DEGREES)
    title = f"{args.model}, {args.length:,} tokens, {degrees}, {args.schedule}"
    closed = predict(scenario.run, scenario.cluster, args.schedule).total
    print(f"{title}\n{summary(line)}")
    print(f"  closed form of the busiest rank {closed * 1e3:,.1f} ms")
    print(f"  simulated in {time.process_time() - begin:.1f} CPU seconds")
    for name in scenario.cluster.hardware.assumed:
        print(f"  assumed: {name}")
    if args.trace:
        print(f"{write_trace(args.trace, line.spans):,} events in {args.trace}")
    if args.plot:
        from megatron_bp.planning.drawing import draw

        draw(args.plot, line, title)
        print(f"drawn in {args.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
