"""The context-parallel axis carries the context group, its hierarchy the clean shards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.distributed import run_distributed

MODES = {"csbp": [4, 1], "pure": [1, 4], "hybrid": [2, 2]}


@pytest.fixture(scope="module")
def seen() -> list[dict[str, Any]]:
    return run_distributed(_accessors, 4)


@pytest.mark.parametrize("mode", MODES)
def test_accessors_name_the_groups_of_a_mode(seen: list[dict[str, Any]], mode: str) -> None:
    shards, replicas = MODES[mode]
    for rank, answers in enumerate(seen):
        got = answers[mode]
        assert got["group"] == got["global_ranks"] == [0, 1, 2, 3]
        assert (got["rank"], got["size"]) == (rank, 4)
        first = rank - rank % shards
        assert got["shards"] == list(range(first, first + shards)), "adjacent ranks"
        assert got["replicas"] == [rank % shards + shards * i for i in range(replicas)]


@pytest.mark.parametrize("mode", MODES)
def test_block_groups_agree_from_both_sources(seen: list[dict[str, Any]], mode: str) -> None:
    for answers in seen:
        got = answers[mode]
        assert got["from_state"] == got["from_collection"] == [got[x] for x in _NAMES]


def test_a_context_of_one_rank_needs_no_group(seen: list[dict[str, Any]]) -> None:
    assert all(answers["one"] == (1, 0, 1) for answers in seen)


def test_groups_without_clean_shards_are_refused(seen: list[dict[str, Any]]) -> None:
    assert all("hierarchical_context_parallel_sizes=[C, P // C]" in x["refused"] for x in seen)


def test_nothing_is_left_after_destroying(seen: list[dict[str, Any]]) -> None:
    assert not any(itertools.chain.from_iterable(answers["left"] for answers in seen))


_NAMES = ("group", "shards", "replicas")


def _accessors(rank: int, num_ranks: int) -> dict[str, Any]:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_bp.mcore import parallel_state as ours

    def ranks(group: Any) -> list[int]:
        return dist.get_process_group_ranks(group)

    def of(groups: Any) -> list[list[int]]:
        return [ranks(groups.context), ranks(groups.clean_shards), ranks(groups.clean_replicas)]

    answers: dict[str, Any] = {"left": []}
    for mode, sizes in MODES.items():
        parallel_state.initialize_model_parallel(
            context_parallel_size=4, hierarchical_context_parallel_sizes=sizes
        )
        collection = ProcessGroupCollection.use_mpu_process_groups()
        answers[mode] = {
            "group": ranks(ours.get_block_parallel_group()),
            "global_ranks": ours.get_block_parallel_global_ranks(),
            "rank": ours.get_block_parallel_rank(),
            "size": ours.get_block_parallel_world_size(),
            "shards": ranks(ours.get_clean_shard_group()),
            "replicas": ranks(ours.get_clean_replica_group()),
            "from_state": of(ours.make_block_groups()),
            "from_collection": of(ours.make_block_groups(collection)),
        }
        ours.destroy_block_parallel()
        answers["left"].append(parallel_state.model_parallel_is_initialized())
    parallel_state.initialize_model_parallel(context_parallel_size=4)
    try:
        ours.make_block_groups()
    except RuntimeError as error:
        answers["refused"] = str(error)
    ours.destroy_block_parallel()
    parallel_state.initialize_model_parallel()
    single = ours.make_block_groups()
    answers["one"] = (single.num_ranks, single.rank, single.num_clean_shards)
    ours.destroy_block_parallel()
    return answers
