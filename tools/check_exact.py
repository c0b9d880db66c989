#!/usr/bin/env python
"""Compares one training step in every layout with one process and a dense mask.

    python tools/check_exact.py --layout all --dtype fp64 --json out.json
    python tools/check_exact.py --layout csbp4 --layout moe

Prints one line a case and a summary; exits with 1 if a case is not exact. `--break` drops one
rank's share of every reduce-scatter: cases that use one must then fail.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

# One thread a process: many small ranks share this machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.multiprocessing as mp

from megatron_bp.mcore import cpu

if not torch.cuda.is_available():
    cpu.enable_cpu()

from megatron_bp.mcore.exactness_cases import DTYPE, MODES, OTHERS, TOLERANCE, cases, run_cases


def main() -> int:
    """Returns 0 if every case is exact."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    names = [*MODES, *OTHERS]
    parser.add_argument("--layout", action="append", choices=["all", *names], default=[])
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="fp64")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    parser.add_argument("--break", dest="broken", action="store_true", help="sabotage, see above")
    options = parser.parse_args()
    chosen = names if not options.layout or "all" in options.layout else options.layout
    todo = cases(chosen, DTYPE[options.dtype])
    rows, begin = [], time.perf_counter()
    for world in sorted({layout.world_size for _, _, layout in todo}):
        part = [case for case in todo if case[2].world_size == world]
        print(f"== {len(part)} cases on {world} process(es)", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run_cases, args=(part, folder, options.broken), nprocs=world)
            rows += json.loads((Path(folder) / "rows.json").read_text())
    limit = TOLERANCE[options.dtype]
    bad = [row for row in rows if not max(row["grad_error"], row["loss_error"]) <= limit]
    worst = max(row["grad_error"] for row in rows)
    print(
        f"{len(rows)} cases, {len(bad)} not exact; largest relative gradient error {worst:.2e} "
        f"(limit {limit:.0e}), {time.perf_counter() - begin:.0f} s"
    )
    if options.json:
        options.json.write_text(json.dumps({"limit": limit, "cases": rows}, indent=1))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
