"""The example's chats hold real functions and their docstrings."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
make_chats = importlib.import_module("make_chats")

MODULE = '''
def described(a):
    """Return one more than the number a."""
    return a + 1

def undescribed(a):
    return a

class C:
    def empty(self):
        """Do nothing at all, says this text."""
'''


def test_a_function_is_answered_without_its_docstring(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lib/test").mkdir(parents=True)
    (tmp_path / "lib/a.py").write_text(MODULE)
    (tmp_path / "lib/bad.py").write_text("def (")
    (tmp_path / "lib/test/b.py").write_text(MODULE)
    assert make_chats.main([str(tmp_path / "chats.jsonl"), str(tmp_path / "lib")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
    assert len(rows) == 1, "undescribed and empty functions, and tests, are left out"
    question, answer = (message["content"] for message in rows[0]["messages"])
    assert "named described" in question
    assert "one more than the number" in question
    ast.parse(answer)
    assert answer == "def described(a):\n    return a + 1"
    assert "1 files could not be read" in capsys.readouterr().out


def test_nothing_found_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    assert make_chats.main([str(tmp_path / "chats.jsonl"), str(tmp_path / "lib")]) == 1
