#!/usr/bin/env python3
"""Says what a training run would do on a cluster, and whether it fits, without starting it.

    python tools/dry_run.py --num-gpus 16 --gpus-per-node 8 --gpu-memory-gib 80 -- FLAGS...

FLAGS are those of examples/pretrain_bdlm.py. Prints ranks and groups, the memory of a GPU in parts
and the bytes it sends in a step; ends with code 1, and flags that would work, if it does not fit.
Needs no GPU, no checkpoint and no data.
"""

import argparse
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--num-gpus", type=int, required=True, help="GPUs of the whole run")
    add("--gpus-per-node", type=int, default=8, help="GPUs of a node (default %(default)s)")
    add("--gpu-memory-gib", type=float, required=True, help="memory of one GPU, for example 80")
    add(
        "--reserve-gib",
        type=float,
        default=6.0,
        help="memory left to CUDA, NCCL and fragments (default %(default)s)",
    )
    add("flags", nargs="*", metavar="FLAGS", help="after --: flags of the training script")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")

    from megatron_bp.mcore.dry_run import main as report
    from megatron_bp.mcore.dry_run_shape import Cluster

    cluster = Cluster(
        options.num_gpus, options.gpus_per_node, options.gpu_memory_gib, options.reserve_gib
    )
    return report(cluster, options.flags)


if __name__ == "__main__":
    sys.exit(main())
