"""The pretraining script that tests start as users start theirs."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def pretrain_script() -> str:
    """Returns the `pretrain_gpt.py` of the checkout of Megatron-LM that MEGATRON_LM names, if set.

    Else a script of our own that calls the same entry points: Megatron's wheel ships none.
    """
    checkout = os.environ.get("MEGATRON_LM")
    if checkout:
        return str(Path(checkout, "pretrain_gpt.py"))
    return str(Path(__file__).with_name("stand_in_pretrain.py"))


def run_script(path: str) -> None:
    """Runs a script in this process as `python path` would: its folder comes first on the path."""
    sys.path.insert(0, str(Path(path).parent))
    try:
        runpy.run_path(path, run_name="__main__")
    finally:
        del sys.path[0]
