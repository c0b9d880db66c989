"""Shares one process that has imported Megatron among the tests that fork jobs from it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.mcore.forks import Megatron


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test comes first, so that no worker is left with it at the end."""
    items.sort(key=lambda item: "test_check_exact" not in item.nodeid)


@pytest.fixture(scope="session")
def megatron() -> Iterator[Megatron]:
    """A process where `fork_job` and `finish` of tests/mcore/forks.py work, by `megatron.call`."""
    with Megatron() as process:
        yield process
