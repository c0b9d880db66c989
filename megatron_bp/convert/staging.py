"""Output directories that appear whole or not at all, and never replace foreign data.

Owns the `.partial` sibling, the final rename, the overwrite rule and the disk space check; knows
nothing of what is written. Specified by tests/convert/test_staging.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MANIFEST_NAME = "bdlm_conversion.json"
_PARTIAL_MARK = ".partial_conversion"
_SPARE_BYTES = 64 * 2**20


def check_output(target: Path, *, overwrite: bool, need_bytes: int) -> None:
    """Passes only when `target` may be written and its disk has room.

    Raises: ValueError naming the directory and what to do.
    """
    if target.exists():
        if not overwrite:
            raise ValueError(f"{target} already exists; choose another path or give --overwrite")
        if not (target / MANIFEST_NAME).is_file():
            raise ValueError(
                f"{target} exists and has no {MANIFEST_NAME}, so this tool did not write it; "
                f"remove it yourself or choose another path"
            )
    partial = _partial_path(target)
    if partial.exists() and not (partial / _PARTIAL_MARK).is_file():
        raise ValueError(f"{partial} is in the way and was not written by this tool; move it")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{parent} is not a directory; create it or correct the output path")
    free = shutil.disk_usage(parent).free
    if free < need_bytes + _SPARE_BYTES:
        raise ValueError(
            f"{parent} has {free / 2**30:.1f} GiB free, the output needs "
            f"{(need_bytes + _SPARE_BYTES) / 2**30:.1f} GiB; free space or choose another disk"
        )


@contextmanager
def staged(target: Path, *, overwrite: bool, need_bytes: int) -> Iterator[Path]:
    """Yields an empty `.partial` sibling which becomes `target` on success and vanishes on failure.

    Raises: ValueError as `check_output`; AssertionError when no manifest was written.
    """
    check_output(target, overwrite=overwrite, need_bytes=need_bytes)
    partial = _partial_path(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    mark = partial / _PARTIAL_MARK
    mark.write_text("written by an interrupted conversion; safe to delete\n")
    try:
        yield partial
        assert (partial / MANIFEST_NAME).is_file(), "a conversion ends by writing its manifest"
        mark.unlink()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _swap(partial, target)


def _swap(partial: Path, target: Path) -> None:
    if not target.exists():
        os.rename(partial, target)
        return
    old = target.with_name(target.name + ".old")
    if old.exists():
        raise ValueError(f"{old} is in the way of replacing {target}; move it (new: {partial})")
    os.rename(target, old)
    os.rename(partial, target)
    shutil.rmtree(old)


def _partial_path(target: Path) -> Path:
    return target.with_name(target.name + ".partial")
