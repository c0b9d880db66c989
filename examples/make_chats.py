#!/usr/bin/env python3
"""Makes chats out of Python code: the docstring of a function is asked for, its source answered.

    make_chats.py chats.jsonl /usr/lib/python3.12 --max-characters 1200
One JSON line a function with a docstring of at least 20 characters. Example data for
tools/preprocess.py --format chat. Specified by tests/test_make_chats.py.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

SKIPPED = ("site-packages", "test", "tests", "idlelib", "lib2to3")
MIN_DOCSTRING = 20  # characters


def functions_of(source: str) -> Iterator[tuple[str, str, str]]:
    """(name, docstring, source without the docstring) of each function in a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old code
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node) or ""
        if len(docstring) < MIN_DOCSTRING or len(node.body) < 2:
            continue
        node.body = node.body[1:]
        yield node.name, docstring, ast.unparse(node)


def chat_of(name: str, docstring: str, code: str) -> dict[str, object]:
    """A record of tools/preprocess.py --format chat."""
    question = f"Write a Python function named {name}.\n\n{docstring}"
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": code},
        ]
    }


def main(arguments: list[str]) -> int:
    """Writes the chats and says how many there are."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("folder", type=Path, help="Python files are taken from here")
    parser.add_argument("--max-characters", type=int, default=1200, help="of question and answer")
    options = parser.parse_args(arguments)
    num_chats = num_unreadable = 0
    with options.output.open("w", encoding="utf-8") as file:
        for path in sorted(options.folder.rglob("*.py")):
            if any(part in SKIPPED for part in path.relative_to(options.folder).parts):
                continue
            try:
                found = list(functions_of(path.read_text(encoding="utf-8")))
            except (SyntaxError, UnicodeDecodeError, ValueError):
                num_unreadable += 1
                continue
            for name, docstring, code in found:
                if len(docstring) + len(code) <= options.max_characters:
                    file.write(json.dumps(chat_of(name, docstring, code)) + "\n")
                    num_chats += 1
    print(f"{options.output}: {num_chats} chats; {num_unreadable} files could not be read")
    return 0 if num_chats else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
