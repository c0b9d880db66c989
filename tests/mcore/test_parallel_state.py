"""The context-parallel axis carries the context group, its hierarchy the clean shards."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

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


def test_nodes_and_blocking_are_chosen_by_links(seen: list[dict[str, Any]]) -> None:
    for rank, answers in enumerate(seen):
        node = rank // 2 * 2
        by_node = ("NodeGroup", [node, node + 1], [rank % 2, rank % 2 + 2])
        assert answers["csbp"]["by_node"] == {"clean_shards": by_node, "context": by_node}
        assert answers["csbp"]["blocking"] == ("BlockingGroup", "NodeGroup")
        assert answers["csbp"]["by_host"] == "ProcessGroup", "all ranks are on this host"
        # Two shards fit into a node, and replicas exchange nothing.
        assert answers["hybrid"]["by_node"] == dict.fromkeys(("clean_shards", "context"))
        assert answers["hybrid"]["blocking"] == ("BlockingGroup", "ProcessGroup")


def test_degrees_that_do_not_fill_nodes_are_refused(seen: list[dict[str, Any]]) -> None:
    for answers in seen:
        assert "are on nodes [0, 0, 0, 1]; a hierarchical gather needs" in answers["no_fit"]


def test_a_context_of_one_rank_needs_no_group(seen: list[dict[str, Any]]) -> None:
    assert all(answers["one"] == (1, 0, 1) for answers in seen)


def test_groups_without_clean_shards_are_refused(seen: list[dict[str, Any]]) -> None:
    assert all("hierarchical_context_parallel_sizes=[C, P // C]" in x["refused"] for x in seen)


def test_nccl_options_of_the_clean_shards_are_those_that_megatron_calls_hcp(
    seen: list[dict[str, Any]],
) -> None:
    """So `--nccl-communicator-config-path` limits the multiprocessors of their collectives."""
    for answers in seen:
        assert answers["options"] == {"shards": "options of hcp", "replicas": "options of hcp"}


def test_nothing_is_left_after_destroying(seen: list[dict[str, Any]]) -> None:
    assert not any(itertools.chain.from_iterable(answers["left"] for answers in seen))


_NAMES = ("group", "shards", "replicas")


def _linked(answers: dict[str, Any], mode: str) -> dict[str, Any]:
    import torch.distributed as dist

    from megatron_bp.comm.groups import NodeGroup
    from megatron_bp.mcore.parallel_state import Links, make_block_groups

    if mode == "pure":
        return {}
    groups = make_block_groups(links=Links(ranks_per_node=2))
    found: dict[str, Any] = {"by_node": {}}
    for name in ("clean_shards", "context"):
        group = getattr(groups, name)
        parts = (group.inside, group.between) if isinstance(group, NodeGroup) else ()
        ranks = (dist.get_process_group_ranks(part) for part in parts)
        found["by_node"][name] = (type(group).__name__, *ranks) if parts else None
    blocking: Any = make_block_groups(links=Links(ranks_per_node=2, overlap=False)).clean_shards
    found["blocking"] = type(blocking).__name__, type(blocking.whole).__name__
    found["by_host"] = type(make_block_groups(links=Links(-1)).clean_shards).__name__
    try:
        if mode == "csbp":
            make_block_groups(links=Links(ranks_per_node=3))
    except ValueError as error:
        answers["no_fit"] = str(error)
    return found


def _options(ours: Any, parallel_state: Any) -> dict[str, Any]:
    """What each group of a mode was made with, if every name has options of its own."""
    made: dict[Any, Any] = {}
    create = parallel_state.create_group

    def noted(ranks: list[int], *args: Any, pg_options: Any = None, **kwargs: Any) -> Any:
        group = create(ranks, *args, **kwargs)
        made[group] = pg_options
        return group

    with (
        mock.patch.object(parallel_state, "create_group", noted),
        mock.patch.object(
            parallel_state, "get_nccl_options", lambda name, configured: f"options of {name}"
        ),
    ):
        parallel_state.initialize_model_parallel(
            context_parallel_size=4, hierarchical_context_parallel_sizes=MODES["hybrid"]
        )
    found = {
        "shards": made[ours.get_clean_shard_group()],
        "replicas": made[ours.get_clean_replica_group()],
    }
    ours.destroy_block_parallel()
    return found


def _accessors(rank: int, num_ranks: int) -> dict[str, Any]:
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_bp.mcore import parallel_state as ours

    def ranks(group: Any) -> list[int]:
        return dist.get_process_group_ranks(group)

    def of(groups: Any) -> list[list[int]]:
        return [ranks(groups.context), ranks(groups.clean_shards), ranks(groups.clean_replicas)]

    answers: dict[str, Any] = {"left": [], "options": _options(ours, parallel_state)}
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
        answers[mode] |= _linked(answers, mode)
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
