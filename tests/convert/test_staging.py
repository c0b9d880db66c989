"""Specifies megatron_bp/convert/staging.py: outputs are whole or absent, foreign data is safe."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_bp.convert.staging import MANIFEST_NAME, staged


def _make(target: Path, text: str, *, overwrite: bool = False, need_bytes: int = 0) -> None:
    with staged(target, overwrite=overwrite, need_bytes=need_bytes) as partial:
        (partial / "data").write_text(text)
        (partial / MANIFEST_NAME).write_text("{}")


def test_an_output_appears_only_when_it_is_whole(tmp_path: Path):
    target = tmp_path / "out"
    with staged(target, overwrite=False, need_bytes=0) as partial:
        (partial / MANIFEST_NAME).write_text("{}")
        assert not target.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in target.iterdir()] == [MANIFEST_NAME]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_run_leaves_nothing(tmp_path: Path, error: type[BaseException]):
    with pytest.raises(error):
        _fail(tmp_path / "out", error)
    assert list(tmp_path.iterdir()) == []


def _fail(target: Path, error: type[BaseException]) -> None:
    with staged(target, overwrite=False, need_bytes=0) as partial:
        (partial / MANIFEST_NAME).write_text("{}")
        raise error


def test_the_leftover_of_a_killed_run_is_replaced_but_not_a_foreign_directory(tmp_path: Path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "mine").write_text("precious")
    with pytest.raises(ValueError, match=r"out\.partial is in the way"):
        _make(tmp_path / "out", "x")
    assert (partial / "mine").exists()
    (partial / ".partial_conversion").write_text("")
    _make(tmp_path / "out", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_output_is_replaced_only_when_asked_and_ours(tmp_path: Path):
    target = tmp_path / "out"
    _make(target, "old")
    with pytest.raises(ValueError, match="already exists; choose another path or give --overwrite"):
        _make(target, "new")
    _make(target, "new", overwrite=True)
    assert (target / "data").read_text() == "new"
    (target / MANIFEST_NAME).unlink()
    with pytest.raises(ValueError, match="this tool did not write it"):
        _make(target, "newer", overwrite=True)
    assert (target / "data").read_text() == "new"


def test_too_little_disk_is_refused_before_anything_is_written(tmp_path: Path):
    with pytest.raises(ValueError, match="GiB free, the output needs"):
        _make(tmp_path / "out", "x", need_bytes=2**62)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_parent_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="no/such is not a directory"):
        _make(tmp_path / "no" / "such" / "out", "x")
