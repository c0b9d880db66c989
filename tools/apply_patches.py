#!/usr/bin/env python
"""Applies the seams in patches/ to a tree of Megatron-LM or Transformer Engine, or removes them.

    python tools/apply_patches.py --check   TREE     # say what is there, change nothing
    python tools/apply_patches.py --apply   TREE
    python tools/apply_patches.py --reverse TREE     # byte for byte what it was

TREE holds `megatron/`, `transformer_engine/` or `pretrain_gpt.py` (a checkout, or a site-packages
folder). A patch only inserts lines. It has no lines of the file around it; instead series.json has
hashes of the lines before and after each place, as they were in the versions it was tried on, or
names that the file must contain. Where they differ nothing is changed, in any file. Exits with 1 if
a patch does not fit.
"""

import argparse
import hashlib
import json
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

SIDE = 3  # lines on each side of a place that must be the known ones
PATCHES = Path(__file__).parents[1] / "patches"
HUNK = re.compile(r"@@ -(\d+),0 \+(\d+),(\d+) @@$")


class MisfitError(Exception):
    """A patch and a tree do not fit."""


@dataclass(frozen=True)
class Insertion:
    """Lines that go in behind line `after`; hashes of the lines on both sides ("": any), and names
    that are in the file."""

    path: str
    after: int
    lines: tuple[bytes, ...]
    neighbours: tuple[str, str]
    names: tuple[str, ...]


def digest(lines: list[bytes]) -> str:
    """A hash that tells some lines of code from others, and cannot be read."""
    return hashlib.sha256(b"".join(lines)).hexdigest()[:16]


def read_series() -> dict[str, list[Insertion]]:
    """Name of each patch and its insertions, one a file."""
    series = json.loads((PATCHES / "series.json").read_text())
    return {p["name"]: parse(PATCHES / p["name"], p["places"]) for p in series["patches"]}


def parse(file: Path, places: dict[str, list[str]]) -> list[Insertion]:
    """The insertions of a patch file."""
    path, found = "", list[Insertion]()
    lines = file.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        text = line.decode().rstrip("\n")
        if text.startswith("+++ b/"):
            path = text.removeprefix("+++ b/")
        elif text.startswith("@@"):
            match = HUNK.match(text)
            if not match or any(insertion.path == path for insertion in found):
                raise MisfitError(f"{file.name}: {text} is not one place where lines go in")
            body = tuple(each[1:] for each in lines[number + 1 :][: int(match[3])])
            before, behind, *names = places[path]
            found.append(Insertion(path, int(match[1]), body, (before, behind), tuple(names)))
    return found


def changed(insertion: Insertion, content: bytes, wanted: bool) -> bytes:
    """The file with the insertion in it (`wanted`) or out of it; itself, if it is so already."""
    lines = content.splitlines(keepends=True)
    at, size = insertion.after, len(insertion.lines)
    present = tuple(lines[at : at + size]) == insertion.lines
    rest = lines[:at] + lines[at + size :] if present else lines
    lacks = [name for name in insertion.names if name.encode() not in content]
    if lacks or not fits(insertion, rest, at):
        moved = [n for n in range(len(rest) + 1) if fits(insertion, rest, n)]
        what = f"the lines around line {at} are not the ones of the versions it was tried on"
        if lacks:
            what = f"the file has no {lacks[0]}"
        elif len(moved) == 1:
            what = f"the place is at line {moved[0]} instead of {at}: another version of the file"
        raise MisfitError(
            f"{insertion.path}: {what}. Nothing was changed. Use a version that patches/series.json"
            " names, or start scripts with python -m megatron_bp.launch, which needs no patch"
        )
    return b"".join(rest[:at] + list(insertion.lines) * wanted + rest[at:])


def fits(insertion: Insertion, lines: list[bytes], at: int) -> bool:
    """Whether the lines on both sides of a place are the known ones."""
    before, behind = insertion.neighbours
    return before in ("", digest(lines[max(at - SIDE, 0) : at])) and (
        behind in ("", digest(lines[at : at + SIDE]))
    )


def plan(tree: Path, wanted: bool, only: str) -> tuple[dict[Path, bytes], list[str]]:
    """The new content of every file that changes, and a line about each patch."""
    todo: dict[Path, bytes] = {}
    says = []
    for name, insertions in read_series().items():
        if only not in name:
            continue
        missing = [i.path for i in insertions if not (tree / i.path).is_file()]
        if missing:
            says.append(f"{name}: not for this tree (no {missing[0]})")
            continue
        olds = [(tree / i.path).read_bytes() for i in insertions]
        news = [changed(i, old, wanted) for i, old in zip(insertions, olds, strict=True)]
        new_files = zip(insertions, news, olds, strict=True)
        todo |= {tree / i.path: new for i, new, old in new_files if new != old}
        says.append(f"{name}: {'fits, not applied' if (olds != news) == wanted else 'applied'}")
    if all("not for this tree" in line for line in says):
        raise MisfitError(f"{tree}: no patch is for this tree" + "".join(f"\n  {x}" for x in says))
    return todo, says


def main() -> int:
    """Returns 0 if every patch that is for the tree fits it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    for name in ("check", "apply", "reverse"):
        action.add_argument(f"--{name}", metavar="TREE", type=Path)
    parser.add_argument("--only", default="", help="patches with this in their name; default all")
    given = parser.parse_args()
    tree, wanted = given.check or given.apply or given.reverse, not given.reverse
    try:
        todo, says = plan(tree, wanted, given.only)
    except MisfitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(says))
    if not given.check:
        for path, content in todo.items():  # other names may share the old file: a package cache
            new = path.with_name(f".{path.name}.patched")
            new.write_bytes(content)
            shutil.copymode(path, new)
            new.replace(path)
        print(f"{len(todo)} file(s) {'patched' if wanted else 'restored'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
