"""Runs a test file as a script in which Triton kernels are interpreted on the CPU.

The interpreter is chosen when Triton is imported, so it takes a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(file: str) -> None:
    """Returns if the script `file` ends well."""
    root = Path(__file__).parents[1]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, file], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
