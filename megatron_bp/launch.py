"""Runs an unmodified pretraining script of Megatron with block parallelism in it.

    python -m megatron_bp.launch pretrain_gpt.py --block-parallel-size 8 ...
    torchrun --nproc-per-node 8 -m megatron_bp.launch pretrain_gpt.py ...

The script's folder comes first on the path and its arguments are its own, as Python itself would
start it. Knows no Megatron (mcore/launch.py). Specified by tests/test_launch.py.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

USAGE = "usage: python -m megatron_bp.launch SCRIPT.py [arguments of the script and of megatron_bp]"


def main(argv: list[str]) -> None:
    """Runs the script `argv[0]` with the arguments after it.

    Raises: SystemExit with a usage text, if there is no such file; what mcore/launch.py raises.
    """
    if not argv or not Path(argv[0]).is_file():
        given = f"{argv[0]} is not a file" if argv else "no script was given"
        raise SystemExit(f"{given}; name one, for example pretrain_gpt.py\n{USAGE}")
    # Before anything of Megatron is imported: a checkout's own megatron lies beside its script.
    sys.path.insert(0, str(Path(argv[0]).resolve().parent))
    sys.argv = list(argv)
    from megatron_bp.mcore.launch import install

    install()
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
