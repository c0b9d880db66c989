"""Output directories that appear whole or not at all, and never replace foreign data.

Owns the `.partial` sibling with its journal of finished files, the final rename, the overwrite rule
and the disk space check; knows nothing of what is written. Specified by
tests/convert/test_staging.py and test_interruption.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST_NAME = "bdlm_conversion.json"
_PARTIAL_MARK = ".partial_conversion"
_JOURNAL = ".journal"
_SPARE_BYTES = 64 * 2**20


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Returns a digest of everything that decides what a conversion writes."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


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
    partial = partial_path(target)
    if partial.exists() and not (partial / _PARTIAL_MARK).is_file():
        raise ValueError(f"{partial} is in the way and was not written by this tool; move it")
    parent = target.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{parent} is not a directory; create it or correct the output path")
    have = sum(path.stat().st_blocks * 512 for path in partial.rglob("*") if path.is_file())
    free = shutil.disk_usage(parent).free + have
    if free < need_bytes + _SPARE_BYTES:
        raise ValueError(
            f"{parent} has {free / 2**30:.1f} GiB free, the output needs "
            f"{(need_bytes + _SPARE_BYTES) / 2**30:.1f} GiB; free space or choose another disk"
        )


@dataclass(frozen=True)
class Journal:
    """The results of jobs that a killed run had finished, and the place to note more."""

    directory: Path
    finished: Mapping[str, Any]

    def note(self, name: str, result: Any) -> None:
        """Records a JSON result, so that a later run need not repeat the job."""
        path = self.directory / f"{name}.json"
        path.with_suffix(".new").write_text(json.dumps(result))
        os.replace(path.with_suffix(".new"), path)


def open_journal(partial: Path) -> Journal:
    """Returns the journal of a staged directory.

    Files are not flushed to disk one by one: only `staged` does so, before the rename.
    """
    directory = partial / _JOURNAL
    directory.mkdir(exist_ok=True)
    found = {path.stem: json.loads(path.read_text()) for path in directory.glob("*.json")}
    return Journal(directory, found)


@contextmanager
def staged(target: Path, *, overwrite: bool, need_bytes: int, same: str = "") -> Iterator[Path]:
    """Yields a `.partial` sibling which becomes `target` on success and vanishes on failure.

    It is empty, or what a killed run with the same fingerprint `same` left.
    Raises: ValueError as `check_output`, or when another run is writing there; AssertionError when
    no manifest was written.
    """
    check_output(target, overwrite=overwrite, need_bytes=need_bytes)
    partial = partial_path(target)
    partial.mkdir(exist_ok=True)
    mark = partial / _PARTIAL_MARK
    text = f"written by an interrupted conversion; safe to delete\n{same} {_boot()}\n"
    with open(mark, "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another conversion is writing {partial}; wait for it") from None
        if not same or mark.read_text() != text:
            mark.write_text("being emptied; safe to delete\n")
            _empty(partial, mark)
            mark.write_text(text)
        try:
            yield partial
            assert (partial / MANIFEST_NAME).is_file(), "a conversion ends by writing its manifest"
            _to_disk(partial)
            shutil.rmtree(partial / _JOURNAL, ignore_errors=True)
            mark.unlink()
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    _swap(partial, target)


def _empty(directory: Path, but: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path != but:
            path.unlink()


def _to_disk(directory: Path) -> None:
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())


def _boot() -> str:
    # What a killed run wrote is in the page cache; after a crash of the machine it may not be.
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.is_file() else ""


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


def partial_path(target: Path) -> Path:
    """Returns where `staged` writes before the rename."""
    return target.with_name(target.name + ".partial")
