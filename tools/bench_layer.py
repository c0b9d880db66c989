#!/usr/bin/env python
"""Benchmark one attention layer, forward and backward with its exchange, on the ranks of a host.

    torchrun --nproc-per-node 2 tools/bench_layer.py --length 16384 65536 \
        --way csbp csbp-single cp-plain --wire fp32 model --order own-last plain --max-ctas 0 8

All cases of a length are timed in turn. NCCL on GPUs, gloo on CPUs (a trial; give --kernel dense
and a small --length there). `exposed` is the share of a rank's time in which it communicates and
computes nothing (profiler); `slowest` is the rank that waits least.
"""

import argparse
import json
import os
import shlex
import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from megatron_bp.attention.bench import SHAPES, Shape, versions
from megatron_bp.attention.block_parallel import GradWire
from megatron_bp.mcore.layer_bench import PARTS, WAYS, LayerCase, make_groups, measure
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
    p.add_argument("--order", nargs="+", default=["own-last"], choices=["own-last", "plain"])
    p.add_argument("--max-ctas", nargs="+", type=int, default=[0], help="of NCCL, 0: its choice")
    p.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, help="timed beside both")
    p.add_argument("--repeats", type=int, nargs="+", default=[7], help="of each length, or of all")
    p.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    p.add_argument("--json", type=Path)
    return p.parse_args(argv)


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    order = "own-last" if row["own_last"] else "plain"
    name = f"{row['way']}/{row['kernel']}/{row['wire']}/{order}/{row['max_ctas']}"
    if "failed" in row:
        return f"{name:36} {row['length']:>8} failed: {row['failed']}"
    sent = [r["sent_bytes"]["attention"] for r in row["ranks"]]
    expected = [r["expected_bytes"] for r in row["ranks"]]
    agree = "as counted" if sent == expected else f"counted {expected}"
    times = " ".join(f"{x} {row[f'{x}_ms']:8.2f}" for x in PARTS if f"{x}_ms" in row)
    return (
        f"{name:36} {row['length']:>8} {times} ms {row['tflops']:6.0f} TF/s "
        f"{shares(row['ranks'])} bytes {sent} {agree}"
    )


def main(argv: list[str]) -> None:
    """Measure, print, write."""
    args = parse(argv)
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu", int(os.environ.get("LOCAL_RANK", 0)))
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    world, shape = dist.get_world_size(), SHAPES.get(args.shape, TINY)
    rows: list[dict[str, Any]] = []
    groups: dict[Any, Any] = {}  # communicators take memory and seconds to make
    for at, length in enumerate(args.length):
        cases = []
        for way, kernel, wire, order, ctas in product(
            args.way, args.kernel, args.wire, args.order, args.max_ctas
        ):
            own_last = order == "own-last"
            case = LayerCase(shape, length, world, way, kernel, wire, args.views, own_last, ctas)
            kind = case.num_shards, WAYS[way].blocking, ctas
            if kind not in groups:
                groups[kind] = make_groups(*kind)
            cases.append((case, groups[kind]))
        repeats = args.repeats[min(at, len(args.repeats) - 1)]
        found = measure(cases, device, getattr(torch, args.dtype), repeats, args.parts)
        rows += found
        if dist.get_rank() == 0:
            print(*map(line, found), sep="\n", flush=True)
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
