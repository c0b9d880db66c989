"""Specifies megatron_bp/convert/jobs.py: several processes, the same bytes; a death is an error.

Processes are real: only they show that work can be pickled and that a dead one is noticed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_bp.convert import torch_dist_writer
from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.jobs import run_jobs
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from tests.convert.directories import assert_same_files
from tests.convert.tiny_models import QWEN3, make_hf


@dataclass(frozen=True)
class Squares:
    """Job n returns n * n, except as told."""

    fails: int = -1
    dies: int = -1

    def run(self, job: int, advance: Callable[[int], None]) -> int:
        if job == self.fails:
            raise ValueError(f"job {job} is bad")
        if job == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        advance(job)
        return job * job


class Count(Silent):
    """Adds up what is reported."""

    def __init__(self) -> None:
        self.bytes = 0

    def advance(self, num_bytes: int) -> None:
        self.bytes += num_bytes


def test_every_job_is_done_once_and_reported():
    done: dict[int, Any] = {}
    count = Count()
    run_jobs(Squares(), [3, 1, 0, 2], 1, count, done.__setitem__)
    assert done == {n: n * n for n in range(4)}
    assert count.bytes == 6
    with pytest.raises(ValueError, match="workers=0 must be at least 1"):
        run_jobs(Squares(), [0], 0, count, done.__setitem__)


@pytest.mark.slow
def test_processes_do_every_job_and_errors_and_deaths_reach_the_caller():
    done: dict[int, Any] = {}
    count = Count()
    with pytest.raises(ValueError, match="job 5 is bad"):
        run_jobs(Squares(fails=5), [3, 1, 0, 2, 5], 2, count, done.__setitem__)
    assert done == {n: n * n for n in range(4)} or len(done) == 3  # one may still be running
    with pytest.raises(ValueError, match="a worker process died in job 2, perhaps for lack of mem"):
        run_jobs(Squares(dies=2), [0, 1, 2, 3], 2, count, lambda job, result: None)


@pytest.mark.slow
def test_both_directions_write_the_same_bytes_twice_and_with_more_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch_dist_writer, "BATCH_BYTES", 20_000)
    hf = make_hf(tmp_path / "hf", QWEN3)
    for name, workers in (("a", 1), ("b", 1), ("c", 2)):
        root = tmp_path / name
        root.mkdir()
        request = ImportRequest(hf, root / "m", Layout.PER_LAYER, "keep", False, workers=workers)
        hf_to_mcore(request, Silent())
        sizes = (-1, "keep", 50_000, 0, -1, False)
        source = tmp_path / "a" / "m"  # the manifests name their source's files
        assets = source / "hf"
        mcore_to_hf(ExportRequest(source, root / "back", assets, *sizes, workers=workers), Silent())
    assert len(list((tmp_path / "a" / "m" / "release").glob("*.distcp"))) >= 8
    assert len(list((tmp_path / "a" / "back").glob("*.safetensors"))) > 4
    for name in ("b", "c"):
        assert_same_files(tmp_path / "a", tmp_path / name)
