"""Specifies that a killed conversion leaves nothing that looks whole, and goes on when repeated.

Needs processes: only a real SIGKILL skips every clean-up.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_bp.convert import torch_dist_writer
from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.check import inspect_directory
from megatron_bp.convert.megatron_model import find_iteration
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from megatron_bp.convert.torch_dist_io import TorchDistReader
from tests.convert.directories import assert_same_files
from tests.convert.tiny_models import QWEN3, make_hf, read_hf

SCRIPT = """
import os, signal, sys
from pathlib import Path
from megatron_bp.convert import ar_to_bdlm as imports
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.plan import Layout
from megatron_bp.convert import torch_dist_writer
what, source, target, limit = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
torch_dist_writer.BATCH_BYTES = 20_000
class Killer:
    done = 0
    def start(self, label, total_bytes): self.total = total_bytes
    def advance(self, num_bytes):
        self.done += num_bytes
        if 0 <= limit <= self.done:
            os.kill(os.getpid(), signal.SIGKILL)
killer = Killer()
if what == "there":
    imports.hf_to_mcore(
        imports.ImportRequest(source, target, Layout.PER_LAYER, "keep", False), killer)
else:
    mcore_to_hf(ExportRequest(source, target, source / "hf", -1, "keep", 50_000, 0, -1, False),
                killer)
print(killer.total, killer.done)
"""


def _run(*words: object) -> tuple[int, str]:
    command = [sys.executable, "-c", SCRIPT, *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_killed_import_is_no_checkpoint_and_is_finished_by_the_next_run(tmp_path: Path):
    hf = make_hf(tmp_path / "hf", QWEN3)
    m = tmp_path / "m"
    assert _run("there", hf, m, 300_000)[0] == -signal.SIGKILL
    partial = tmp_path / "m.partial"
    assert not m.exists()
    for place in (m, partial, partial / "release"):
        with pytest.raises(ValueError, match=r"not a directory|no Megatron checkpoint|torch_dist"):
            TorchDistReader(find_iteration(place, -1))
        with pytest.raises(ValueError, match=r"not a directory|no Megatron checkpoint|torch_dist"):
            inspect_directory(place)
    kept = {p.name: p.stat().st_ino for p in (partial / "release").glob("*.distcp")}
    assert kept
    status, output = _run("there", hf, m, -1)
    assert status == 0, output
    total, done = (int(word) for word in output.split())
    assert total == done < 300_000  # the rest only
    inodes = {p.name: p.stat().st_ino for p in (m / "release").glob("*.distcp")}
    assert kept.items() <= inodes.items()
    assert len(inodes) > len(kept)
    assert _run("there", hf, tmp_path / "clean", -1)[0] == 0
    assert_same_files(m, tmp_path / "clean")
    assert not partial.exists()

    back = tmp_path / "back"
    assert _run("back", m, back, 200_000)[0] == -signal.SIGKILL
    assert not back.exists()
    status, output = _run("back", m, back, -1)
    assert status == 0, output
    before, after = read_hf(hf), read_hf(back)
    assert before.keys() == after.keys()


class Stop(Silent):
    """Stops a conversion after some bytes, as if killed: `staged` cannot clean up."""

    def __init__(self, limit: int) -> None:
        self.done, self.limit = 0, limit

    def advance(self, num_bytes: int) -> None:
        self.done += num_bytes
        if self.done >= self.limit:
            raise KeyboardInterrupt


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], None]:
    monkeypatch.setattr(torch_dist_writer, "BATCH_BYTES", 20_000)

    def run(source: Path, target: Path) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("megatron_bp.convert.staging.shutil.rmtree", lambda *a, **kw: None)
            with pytest.raises(KeyboardInterrupt):
                hf_to_mcore(_request(source, target), Stop(300_000))
        assert (target.with_name(target.name + ".partial") / "release" / "__0_0.distcp").exists()

    return run


def _request(source: Path, target: Path) -> ImportRequest:
    return ImportRequest(source, target, Layout.PER_LAYER, "keep", overwrite=False)


def test_another_request_does_not_take_over_what_was_left(tmp_path: Path, leave):
    other = make_hf(tmp_path / "other", QWEN3, seed=1)
    leave(make_hf(tmp_path / "hf", QWEN3), tmp_path / "m")
    for name in ("m", "clean"):
        hf_to_mcore(_request(other, tmp_path / name), Silent())
    assert_same_files(tmp_path / "m", tmp_path / "clean")


@pytest.mark.parametrize("touched", [False, True])
def test_a_source_that_changed_is_converted_anew(tmp_path: Path, leave, touched: bool):
    hf = make_hf(tmp_path / "hf", QWEN3)
    leave(hf, tmp_path / "m")
    file = hf / "model.safetensors"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + int(touched)))
    again, clean = Stop(10**9), Stop(10**9)
    hf_to_mcore(_request(hf, tmp_path / "m"), again)
    hf_to_mcore(_request(hf, tmp_path / "clean"), clean)
    assert (again.done == clean.done) == touched
    assert_same_files(tmp_path / "m", tmp_path / "clean")


def test_two_conversions_to_one_place_do_not_mix(tmp_path: Path):
    hf = make_hf(tmp_path / "hf", QWEN3)

    class Second(Silent):
        def advance(self, num_bytes: int) -> None:
            with pytest.raises(ValueError, match=r"another conversion is writing .*m\.partial"):
                hf_to_mcore(_request(hf, tmp_path / "m"), Silent())

    hf_to_mcore(_request(hf, tmp_path / "m"), Second())
    hf_to_mcore(_request(hf, tmp_path / "clean"), Silent())
    assert_same_files(tmp_path / "m", tmp_path / "clean")
