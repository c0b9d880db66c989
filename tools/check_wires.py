#!/usr/bin/env python
"""Check layouts over real wires (NCCL between GPUs, gloo without) against one dense process.

    CUDA_VISIBLE_DEVICES= tools/check_wires.py --write-references refs.pt
    tools/check_wires.py --references refs.pt --json one.json      # one GPU, the yardstick
    torchrun --nproc-per-node 2 tools/check_wires.py --references refs.pt --one one.json

Exits with 1 if a layout is not exact: over 1e-10 (fp64) or 2e-5 (fp32), and over 1.5 times
the error of one rank.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29532")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist

from megatron_bp.mcore import cpu

if not torch.cuda.is_available():
    cpu.enable_cpu()

from megatron_bp.mcore.nccl_exactness import (
    DTYPES,
    PROBLEMS,
    inexact,
    run_layouts,
    write_references,
)


def main() -> int:
    """Returns 0 if everything is exact."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--write-references", type=Path)
    p.add_argument("--references", type=Path)
    p.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    p.add_argument("--problem", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    p.add_argument("--layout", nargs="+", default=[], help="default: all of the world size")
    p.add_argument("--one", type=Path, help="rows of one rank, which bf16 is compared with")
    p.add_argument("--json", type=Path)
    args = p.parse_args()
    if args.write_references:
        write_references(args.write_references)
        return 0
    on_gpu = torch.version.cuda is not None and torch.cuda.is_available()
    if on_gpu:
        local = int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count()
        torch.cuda.set_device(local)
    # Several ranks on one GPU are possible over gloo only.
    shared = on_gpu and torch.cuda.device_count() < int(os.environ["WORLD_SIZE"])
    dist.init_process_group("nccl" if on_gpu and not shared else "gloo")
    rows = []
    for row in run_layouts(args.references, args.dtype, args.problem, args.layout):
        rows.append(row)
        if dist.get_rank() == 0:
            print(f"{row['layout']:16} {row['problem']:13} {row['dtype']} loss "
                  f"{row['loss_error']:.1e} gradient {row['grad_error']:.1e} "
                  f"({row['worst_parameter']})", flush=True)  # fmt: skip
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    one = json.loads(args.one.read_text()) if args.one else []
    bad = inexact(rows, one)
    if dist.get_rank() == 0:
        print(f"{len(rows)} cases over {dist.get_backend()}, {len(bad)} not exact", *bad, sep="\n")
    dist.destroy_process_group()
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
