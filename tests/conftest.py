"""Shares one process that has imported Megatron among the tests that fork jobs from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mcore.forks import Megatron


@pytest.fixture(scope="session")
def megatron() -> Iterator[Megatron]:
    """A process where `fork_job` and `finish` of tests/mcore/forks.py work, by `megatron.call`."""
    with Megatron() as process:
        yield process
