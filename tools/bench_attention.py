#!/usr/bin/env python
"""Benchmark one rank's block-parallel attention beside FlexAttention and dense ceilings.

    tools/bench_attention.py --shape nemotron-8b --length 65536 262144 --ranks 8 --rank 3 \
        --run native/flash4 flex dense/flash4 --json out.json --plot out.png

A run is native/KERNEL, interval/KERNEL, dense/KERNEL (the ceiling with as many pairs) or flex. No
wires: a layer with its exchange, on several GPUs, is tools/bench_layer.py.
"""

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_bp.attention import bench
from megatron_bp.attention.contract import Strategy
from megatron_bp.attention.timing import Clock


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--shape", nargs="+", default=["nemotron-8b"], choices=list(bench.SHAPES))
    p.add_argument("--length", nargs="+", type=int, default=[65536], help="L, in tokens")
    p.add_argument("--ranks", type=int, default=8, help="P")
    p.add_argument("--rank", nargs="+", type=int, default=[3])
    p.add_argument("--views", type=int, default=1)
    p.add_argument("--block", type=int, default=0, help="tokens; 0 is the shape's own")
    p.add_argument("--window", type=int, default=-1, help="tokens; -1 is the shape's own")
    p.add_argument("--run", nargs="+", default=["native/flash4", "flex", "dense/flash4"])
    p.add_argument("--repeats", type=int, default=7)
    p.add_argument("--burst", type=float, default=200, help="time back to back for, ms")
    p.add_argument("--graphs", action="store_true", help="time replays of CUDA graphs (not flex)")
    p.add_argument("--check", action="store_true", help="errors against fp32 at L 2048, P 2")
    p.add_argument("--profile", action="store_true", help="time of each device kernel")
    p.add_argument("--json", type=Path)
    p.add_argument("--plot", type=Path, help="PNG of TFLOP/s against L")
    p.add_argument("--read", nargs="+", type=Path, help="plot these JSON files; measure nothing")
    return p.parse_args(argv)


def cases(args: argparse.Namespace) -> list[tuple[str, bench.Case]]:
    """Every combination asked for."""
    found = []
    for name in args.shape:
        shape = bench.SHAPES[name]
        if args.block:
            shape = replace(shape, block_size=args.block)
        if args.window >= 0:
            shape = replace(shape, window=args.window)
        found += [
            (name, bench.Case(shape, length, args.ranks, rank, args.views))
            for length in args.length
            for rank in args.rank
        ]
    return found


def measure(name: str, case: bench.Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A case's lines of the table: its runs are timed in turn, round by round."""
    head = {"shape": name, "length": case.length, "rank": case.rank, "views": case.num_views}
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    ready, lines = {}, {}
    for at, run in enumerate(args.run):
        try:
            ready[at] = bench.prepare(run, case, device)
        except Exception as error:  # one run that fails must not end the others
            lines[at] = {**head, "run": run, "failed": str(error)[:300]}
    results = bench.measure(list(ready.values()), Clock(args.repeats, args.burst), args.graphs)
    for at, result in zip(ready, results, strict=True):
        lines[at] = {**head, "run": args.run[at], **result.as_dict()}
    del ready
    torch.cuda.empty_cache()
    for line in lines.values():
        kind, _, kernel = str(line["run"]).partition("/")
        if kind in list(Strategy) and "failed" not in line:
            line |= details(bench.Layer(case, Strategy(kind), kernel), device, args)
    return [lines[at] for at in range(len(args.run))]


def details(layer: bench.Layer, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    """Errors and kernel times, where they were asked for."""
    found: dict[str, Any] = {}
    if args.check:
        small = replace(layer, case=replace(layer.case, length=2048, num_ranks=2, rank=1))
        found["errors"] = bench.errors(small, device, torch.bfloat16)
    if args.profile:
        found["kernels"] = bench.kernel_times(layer, device)
        found["wire_copies_ms"] = bench.wire_copies_ms(layer.case, device, Clock(args.repeats))
    return found


def show(line: dict[str, Any]) -> None:
    """Print one line of the table, and errors and kernel times where they were asked for."""
    start = "{shape:24}{length:8}{rank:5} {run:22}".format(**line)
    if "failed" in line:
        print(f"{start} failed: {line['failed']}", flush=True)
        return
    f = {k: float(str(v)) for k, v in line.items() if isinstance(v, float)}
    print(f"{start}{f['forward_ms']:9.3f}{f['backward_ms']:9.3f}{f['forward_tflops']:6.0f}"
          f"{f['backward_tflops']:6.0f}{f['tflops']:6.0f}     {f['peak_gib']:7.2f}"
          f"{f['host_ms']:9.3f}", flush=True)  # fmt: skip
    for key in ("errors", "kernels", "wire_copies_ms"):
        if key in line:
            print("   ", key, {k: f"{v:.2e}" for k, v in line[key].items()})


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Writes a PNG of TFLOP/s against L, one curve for each shape and run, of the first rank."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5))
    axes = figure.subplots()
    lines = [x for x in lines if "tflops" in x and x["rank"] == lines[0]["rank"]]
    for key in sorted({(x["shape"], x["run"]) for x in lines}):
        points = sorted((x["length"], x["tflops"]) for x in lines if (x["shape"], x["run"]) == key)
        axes.plot(*zip(*points, strict=True), marker="o", label=" ".join(key))
    axes.set_xscale("log", base=2)
    axes.set(xlabel="L (clean tokens)", ylabel="TFLOP/s on allowed pairs, f+b", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(argv: list[str]) -> None:
    """Measure, print, write; or only plot what earlier runs wrote."""
    args = parse(argv)
    if args.read:
        lines = [x for path in args.read for x in json.loads(path.read_text())["results"]]
        plot(lines, args.plot)
        return
    lines = []
    print(f"{'shape':24}{'L':>8}{'rank':>5} {'run':22}{'fwd ms':>9}{'bwd ms':>9}"
          f"{'fwd':>6}{'bwd':>6}{'f+b':>6} TF/s{'GiB':>7}{'host ms':>9}")  # fmt: skip
    for name, case in cases(args):
        for line in measure(name, case, args):
            lines.append(line)
            show(line)
    if args.json:
        record = {
            "command": shlex.join(["tools/bench_attention.py", *argv]),
            "device": torch.cuda.get_device_name(),
            "versions": bench.versions(),
            "results": lines,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.plot:
        plot(lines, args.plot)


if __name__ == "__main__":
    main(sys.argv[1:])
