"""Compares whole output directories byte by byte. For tests only."""

from __future__ import annotations

from pathlib import Path


def contents(directory: Path) -> dict[str, bytes]:
    """Returns every file below a directory by its relative path."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def assert_same_files(one: Path, other: Path) -> None:
    """Asserts that both directories have the same files with the same bytes."""
    first, second = contents(one), contents(other)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []
