#!/usr/bin/env python
"""Benchmark one attention layer, forward and backward with its exchange, on the ranks of a host.

    torchrun --nproc-per-node 2 tools/bench_layer.py --length 16384 65536 \
        --way csbp csbp-single cp-plain --wire fp32 model --json layer.json

NCCL on GPUs, gloo on CPUs (a trial; give --kernel dense and a small --length there).
`exposed` is the share of a rank's time in which it communicates and computes nothing (profiler).
"""

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from megatron_bp.attention.bench import SHAPES, Shape, versions
from megatron_bp.attention.block_parallel import GradWire
from megatron_bp.mcore.layer_bench import WAYS, LayerCase, make_groups, measure
from megatron_bp.mcore.step_waits import shares

TINY = Shape(4, 2, 8, block_size=8)


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--shape", default="nemotron-8b", choices=[*SHAPES, "tiny"])
    p.add_argument("--length", nargs="+", type=int, default=[65536], help="L, in tokens")
    p.add_argument("--way", nargs="+", default=["csbp"], choices=list(WAYS))
    p.add_argument("--kernel", nargs="+", default=["auto"], help="or flex_baseline")
    p.add_argument("--wire", nargs="+", default=["fp32"], type=GradWire, help="fp32, model")
    p.add_argument("--views", type=int, default=1)
    p.add_argument("--repeats", type=int, nargs="+", default=[7], help="of each length, or of all")
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    p.add_argument("--json", type=Path)
    return p.parse_args(argv)


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    name = f"{row['way']}/{row['kernel']}/{row['wire']}"
    if "failed" in row:
        return f"{name:30} {row['length']:>8} failed: {row['failed']}"
    sent = [r["sent_bytes"]["attention"] for r in row["ranks"]]
    expected = [r["expected_bytes"] for r in row["ranks"]]
    agree = "as counted" if sent == expected else f"counted {expected}"
    return (
        f"{name:30} {row['length']:>8} fwd {row['forward_ms']:8.2f} bwd {row['backward_ms']:8.2f} "
        f"both {row['both_ms']:8.2f} ms {row['tflops']:6.0f} TF/s {shares(row['ranks'])} "
        f"bytes {sent} {agree}"
    )


def main(argv: list[str]) -> None:
    """Measure, print, write."""
    args = parse(argv)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world, shape = dist.get_world_size(), SHAPES.get(args.shape, TINY)
    rows: list[dict[str, Any]] = []
    for way in args.way:
        # One set of groups for a way: communicators take memory and seconds to make.
        groups = make_groups(int(WAYS[way].shards * world) or 1, WAYS[way].blocking)
        for at, length in enumerate(args.length):
            repeats = args.repeats[min(at, len(args.repeats) - 1)]
            for kernel in args.kernel:
                for wire in args.wire:
                    case = LayerCase(shape, length, world, way, kernel, wire, args.views)
                    try:
                        row = measure(case, groups, torch.device(device),
                                      getattr(torch, args.dtype), repeats)  # fmt: skip
                    except Exception as error:
                        text = f"{type(error).__name__}: {str(error)[:300]}"
                        row = {"way": way, "kernel": kernel, "wire": str(wire), "length": length,
                               "failed": text}  # fmt: skip
                    rows.append(row)
                    if dist.get_rank() == 0:
                        print(line(row), flush=True)
                        write(args, argv, rows)
    dist.destroy_process_group()


def write(args: argparse.Namespace, argv: list[str], rows: list[dict[str, Any]]) -> None:
    """Writes what is measured so far."""
    if args.json:
        record = {
            "command": shlex.join(["tools/bench_layer.py", *argv]),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "world": dist.get_world_size(),
            "versions": versions(),
            "results": rows,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
