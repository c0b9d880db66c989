#!/usr/bin/env python
"""Benchmark whole training steps of a named model shape, cut to some layers, on one GPU or several.

    tools/bench_step.py --shape nemotron-3b --layers 8 --length 65536 \
        --case one/flex one/ours --baseline one/flex --json step.json
    torchrun --nproc-per-node 2 tools/bench_step.py --case cp-plain/flex csbp/ours

A case is MODE/RECIPE (megatron_bp/mcore/step_cases.py), or MODE/RECIPE@L,L to run it at some of
the lengths; --layers and --repeats take a number for each length, or one for all. Everything after
-- goes to Megatron, for every case. Without a CUDA device the local layers run on the CPU (gloo),
to try a command. Layers are Transformer Engine's; -- --transformer-impl local takes Megatron's.
"""

import argparse
import contextlib
import json
import logging
import os
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
# One process is its own group.
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("LOCAL_RANK", "0")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29531")

import torch

from megatron_bp.attention.bench import versions
from megatron_bp.mcore import step_bench
from megatron_bp.mcore.step_cases import MODES, RECIPES, SHAPES, Case, Job, cases_at, cut
from megatron_bp.planning.hardware import HARDWARE
from megatron_bp.planning.predict import Cluster, Schedule, predict
from megatron_bp.planning.shapes import MODELS


def parse(argv: list[str]) -> argparse.Namespace:
    """Arguments; `extra` is what follows --."""
    own, _, extra = " ".join(shlex.quote(x) for x in argv).partition(" -- ")
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--shape", default="nemotron-3b", choices=[*MODELS, *SHAPES])
    p.add_argument("--layers", type=int, nargs="+", default=[8])
    p.add_argument("--length", type=int, nargs="+", default=[65536], help="L, in tokens")
    p.add_argument("--block", type=int, default=32, help="tokens")
    p.add_argument("--objective", default="standard")
    p.add_argument("--case", nargs="+", default=["one/flex", "one/ours"],
                   help=f"MODE of {', '.join(MODES)}; RECIPE of {', '.join(RECIPES)}")  # fmt: skip
    p.add_argument("--ranks", type=int, default=0, help="P; 0: all processes share one sample")
    p.add_argument("--tensor", type=int, default=1, help="tensor-parallel ranks")
    p.add_argument("--pipeline", type=int, default=1, help="pipeline stages")
    p.add_argument("--warmups", type=int, default=2)
    p.add_argument("--repeats", type=int, nargs="+", default=[3])
    p.add_argument("--no-profile", dest="profile", action="store_false")
    p.add_argument("--baseline", default="", help="case whose tokens/s the others are divided by")
    p.add_argument("--peak-tflops", type=float, default=989.0, help="of one GPU, dense bf16")
    p.add_argument("--dtype", default="bf16", choices=["bf16", "fp32"])
    p.add_argument("--queues", type=int, default=1, help="hardware queues of a GPU")
    p.add_argument("--json", type=Path)
    args = p.parse_args(shlex.split(own))
    args.extra = shlex.split(extra)
    return args


def open_device(queues: int) -> None:
    """Makes this rank's context with some hardware queues; Megatron wants to read 1 afterwards."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(queues)
    if torch.cuda.is_available():
        torch.zeros(1, device=f"cuda:{os.environ['LOCAL_RANK']}")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"


def commit() -> str:
    """The state of the code, if git knows it."""
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    return found.stdout.strip() or "unknown"


def predicted_ms(job: Job, case: Case, target_share: float) -> float:
    """What the planner predicts for a case with our kernels on H200s of one host."""
    waits = "--no-bp-overlap" in MODES[case.mode].extra
    schedule = Schedule.BLOCKING if waits else Schedule.OVERLAPPED
    return 1e3 * predict(job.run(case, target_share), Cluster(HARDWARE["h200"]), schedule).total


def main(argv: list[str]) -> None:
    """Measure, print, write."""
    args = parse(argv)
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    logging.disable(logging.WARNING)
    open_device(args.queues)
    step_bench.start()
    if not torch.cuda.is_available() and rank == 0:
        print("no CUDA device: Megatron's local layers on the CPU, a trial without timings")
    extra = [*(["--bf16"] if args.dtype == "bf16" else []), *args.extra]
    ranks, rows = args.ranks or world // args.tensor // args.pipeline, list[dict[str, Any]]()
    for at, length in enumerate(args.length):
        layers, repeats = (x[min(at, len(x) - 1)] for x in (args.layers, args.repeats))
        job = Job(
            cut(SHAPES.get(args.shape) or MODELS[args.shape], layers), length, args.block,
            args.objective, ranks, world // ranks // args.tensor // args.pipeline, args.tensor,
            args.pipeline, tuple(extra),
        )  # fmt: skip
        clock = step_bench.Clock(args.warmups, repeats, args.profile)
        fastest: dict[str, float] = {}
        for case in cases_at(args.case, length):
            begin = time.monotonic()
            try:
                with contextlib.redirect_stdout(sys.stderr):  # Megatron prints a lot
                    measured = step_bench.run_case(job, case, clock)
                rows.append(step_bench.summary(job, case, measured, args.peak_tflops))
                fastest[case.name] = rows[-1]["tokens_per_s"]
                if not RECIPES[case.recipe].flex:
                    rows[-1]["predicted_ms"] = predicted_ms(job, case, measured.target_share)
            except Exception as error:
                traceback.print_exc()
                message = f"{type(error).__name__}: {str(error)[:300]}"
                rows.append({"case": case.name, "length": length, "failed": message})
            rows[-1]["case_s"] = round(time.monotonic() - begin, 1)  # with building and profile
            if {args.baseline, case.name} <= set(fastest):
                rows[-1]["speedup"] = fastest[case.name] / fastest[args.baseline]
            if rank == 0:
                print(step_bench.line(rows[-1]), flush=True)
                write(args, argv, rows)


def write(args: argparse.Namespace, argv: list[str], rows: list[dict[str, Any]]) -> None:
    """Writes what is measured so far, so that a later failure loses nothing."""
    on_cuda = torch.version.cuda is not None and torch.cuda.is_available()
    record = {
        "command": shlex.join(["tools/bench_step.py", *argv]),
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "versions": versions(), "commit": commit(), "baseline": args.baseline, "results": rows,
    }  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
