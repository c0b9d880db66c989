#!/usr/bin/env python3
"""Finds the fastest way to train a block-diffusion model on given GPUs, and prints its flags.

tools/plan_topology.py --model nemotron-14b --length 262144 --gpus 16
tools/plan_topology.py --model path/to/config.json --length 65536 --gpus 64 --why
tools/plan_topology.py --model nemotron-8b --length 131072 --gpus 8 --calibration bench.json
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import HARDWARE, calibrated, hardware_named
from megatron_bp.planning.hf_config import model_from_file
from megatron_bp.planning.report import flags_text, heading, memory_text, table, why
from megatron_bp.planning.search import MEGATRON, search
from megatron_bp.planning.shapes import MODELS, model_named
from megatron_bp.planning.workload import OBJECTIVES, Workload


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--model", required=True, help=f"config.json, or one of {', '.join(MODELS)}")
    p.add_argument("--length", type=int, required=True, help="clean tokens of a sample")
    p.add_argument("--block-size", type=int, default=32, help="tokens of a block")
    p.add_argument("--objective", default="standard", choices=list(OBJECTIVES))
    p.add_argument("--gpus", type=int, required=True)
    p.add_argument("--gpu", default="h200", choices=list(HARDWARE))
    p.add_argument("--node-size", type=int, default=8, help="GPUs that NVLink connects")
    p.add_argument(
        "--global-batch", type=int, default=0, help="samples of a step; default: one for each node"
    )
    p.add_argument("--grad-wire", default="fp32", choices=["fp32", "model"], help="K/V gradients")
    p.add_argument(
        "--main-grads", default="fp32", choices=["fp32", "bf16"], help="accumulated gradients"
    )
    p.add_argument("--best", type=int, default=5, help="how many runs to print")
    p.add_argument("--why", action="store_true", help="explain what rules the others out")
    p.add_argument(
        "--calibration",
        type=Path,
        nargs="+",
        default=[],
        help='what tools/bench_*.py wrote with --json, or {"hardware": {"matmul_tflops": ...}}',
    )
    return p.parse_args(argv)


def main(argv: list[str]) -> int:
    """Search and print."""
    args = parse(argv)
    is_file = args.model not in MODELS and Path(args.model).exists()
    model = model_from_file(Path(args.model)) if is_file else model_named(args.model)
    cluster = Cluster(calibrated(hardware_named(args.gpu), args.calibration), args.node_size)
    workload = Workload(
        model=model,
        objective=args.objective,
        length=args.length,
        block_size=args.block_size,
        world=args.gpus,
        global_batch=args.global_batch or max(1, args.gpus // args.node_size),
        cluster=cluster,
    )
    policy = replace(
        MEGATRON,
        grad_wire_bytes=2 if args.grad_wire == "model" else 4,
        main_grad_bytes=2 if args.main_grads == "bf16" else 4,
    )
    found = search(workload, args.best, policy)
    print(heading(workload, found))
    if found.best:
        print(table(found, workload))
        best = found.best[0]
        print(f"memory of the first, GiB: {memory_text(best)}")
        print(f"flags of the first (add data, tokenizer and --mask-token-id):\n"
              f"{flags_text(best, workload)}")  # fmt: skip
    if args.why or not found.best:
        print(why(found))
    return 0 if found.best else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:
        sys.exit(f"plan_topology: {error}")
