"""A plan is a pure, cached function of its request, and all ranks' plans fit together."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.plan import PlanRequest, make_plan, with_window
from megatron_bp.layout.visibility import CleanRule, CorruptedRule
from tests.layout.test_decomposition import requests


def same(a: Any, b: Any) -> bool:
    """Whether two values of a plan are equal, arrays and nested types included."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(
            same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)
        )
    return bool(a == b)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_equal_requests_give_the_same_plan_object(request: PlanRequest) -> None:
    for rank in range(request.num_ranks):
        assert make_plan(request, rank) is make_plan(replace(request), rank)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_a_plan_depends_on_nothing_but_its_request(request: PlanRequest) -> None:
    rank = request.num_ranks - 1
    first = make_plan(request, rank)
    make_plan.cache_clear()
    make_plan(replace(request, length=request.length + 1, documents=(), prompts=()), 0)
    again = make_plan(request, rank)
    assert again is not first
    assert same(again, first)


def test_the_comparison_of_plans_sees_a_changed_array() -> None:
    plan = make_plan(PlanRequest(length=16, block_size=4), 0)
    assert not same(plan, replace(plan, own_coordinate=plan.own_coordinate + 1))


@settings(max_examples=150, deadline=None)
@given(requests())
def test_every_row_of_the_sample_is_on_exactly_one_rank(request: PlanRequest) -> None:
    plans = [make_plan(request, rank) for rank in range(request.num_ranks)]
    assert len({plan.rows.num_rows for plan in plans}) == 1
    assert plans[0].rows.num_rows % request.row_multiple == 0
    coordinates = [plan.rows.coordinate[plan.rows.stream > 0] for plan in plans]
    assert sorted(np.concatenate(coordinates)) == list(range(request.num_views * request.length))
    for first in range(0, request.num_ranks, request.num_clean_shards):
        clean = [
            plan.rows.position[plan.rows.stream == 0]
            for plan in plans[first : first + request.num_clean_shards]
        ]
        assert sorted(np.concatenate(clean)) == list(range(request.length))


@settings(max_examples=100, deadline=None)
@given(requests())
def test_own_coordinates_name_the_local_keys_or_all_keys_of_the_baseline(
    request: PlanRequest,
) -> None:
    for rank in range(request.num_ranks):
        plan = make_plan(request, rank)
        real = plan.own_coordinate[plan.own_coordinate >= 0]
        if request.gather_corrupted:
            assert sorted(real) == list(range(request.num_views * request.length))
        else:
            np.testing.assert_array_equal(
                plan.own_coordinate, plan.rows.coordinate[plan.rows.num_clean :]
            )


@settings(max_examples=60, deadline=None)
@given(requests())
def test_the_same_pairs_are_computed_in_every_layout(request: PlanRequest) -> None:
    one = replace(request, num_ranks=1, num_clean_shards=1, gather_corrupted=False)
    plans = [make_plan(request, rank) for rank in range(request.num_ranks)]
    clean = sum(
        int((p.visibility.clean_hi - p.visibility.clean_lo)[p.rows.stream == 0].sum())
        for p in plans
    )
    replicas = request.num_ranks // request.num_clean_shards
    repeated = clean // replicas * (replicas - 1)  # clean rows are computed once a replica
    total = sum(plan.visibility.num_pairs for plan in plans)
    assert total - repeated == make_plan(one, 0).visibility.num_pairs


@settings(max_examples=60, deadline=None)
@given(requests())
def test_layers_with_other_windows_share_their_rows(request: PlanRequest) -> None:
    plan = make_plan(request, request.num_ranks - 1)
    other = with_window(plan, 6)
    assert other.rank == plan.rank
    assert other.request == replace(request, window=6)
    assert same(other.rows, plan.rows)
    assert with_window(other, request.window) is plan


def test_a_pruned_layer_launches_corrupted_rows_only() -> None:
    plan = make_plan(PlanRequest(length=32, block_size=4, clean_rule=CleanRule.BLOCK_CAUSAL), 0)
    rows = np.concatenate([launch.rows for launch in plan.corrupted_launches])
    assert len(plan.launches) >= len(plan.corrupted_launches) > 0
    assert (rows >= plan.rows.num_clean).all()


def test_the_clean_shard_of_a_rank_is_its_rank_modulo_the_shards() -> None:
    request = PlanRequest(length=64, block_size=4, num_ranks=6, num_clean_shards=3)
    assert [make_plan(request, rank).shard for rank in range(6)] == [0, 1, 2, 0, 1, 2]


def test_requests_are_hashable_and_distinguish_every_field() -> None:
    base = PlanRequest(length=64, block_size=4, num_ranks=2, num_clean_shards=2)
    changed = {
        "length": 65,
        "block_size": 5,
        "num_ranks": 4,
        "num_clean_shards": 1,
        "num_views": 2,
        "clean_rule": CleanRule.BLOCK_CAUSAL,
        "corrupted_rule": CorruptedRule.CAUSAL,
        "window": 3,
        "documents": ((0, 64),),
        "prompts": (3,),
        "ownership": Ownership.CONTIGUOUS,
        "gather_corrupted": True,
        "row_multiple": 2,
        "windowed_exchange": False,
    }
    assert set(changed) == {field.name for field in fields(PlanRequest)}
    variants = {base, *(replace(base, **{name: value}) for name, value in changed.items())}
    assert len(variants) == 1 + len(changed)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_ranks": 0}, "num_ranks=0 must be at least 1."),
        ({"num_views": 0, "row_multiple": -1}, "num_views=0 must .* row_multiple=-1 must"),
        (
            {"num_ranks": 4, "num_clean_shards": 3},
            "num_ranks=4 must be a multiple of num_clean_shards=3; use num_clean_shards=1 or 4.",
        ),
        (
            {"num_ranks": 4, "num_clean_shards": 2, "gather_corrupted": True},
            "gather_corrupted needs num_clean_shards=2 to equal num_ranks=4.",
        ),
        ({"window": -1}, r"window=-1 must be 0 \(none\) or a positive token count."),
    ],
)
def test_refuses_requests_that_cannot_be_planned(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PlanRequest(length=64, block_size=4, **values)


@pytest.mark.parametrize("rank", [-1, 2])
def test_refuses_a_rank_outside_the_context_group(rank: int) -> None:
    request = PlanRequest(length=64, block_size=4, num_ranks=2)
    with pytest.raises(ValueError, match=rf"rank={rank} must be in \[0, 2\)"):
        make_plan(request, rank)


def test_refuses_documents_that_do_not_cover_the_sample() -> None:
    with pytest.raises(ValueError, match=r"must be non-empty, adjacent and cover \[0, 64\)"):
        make_plan(PlanRequest(length=64, block_size=4, documents=((0, 60),)), 0)


@pytest.mark.parametrize("name", ["clean_rule", "corrupted_rule", "ownership"])
def test_a_rule_given_as_a_string_is_refused(name: str) -> None:
    value = {"clean_rule": "block_causal", "corrupted_rule": "causal", "ownership": "contiguous"}
    with pytest.raises(ValueError, match=rf"{name}='.*' must be one of "):
        PlanRequest(length=16, block_size=4, **{name: value[name]})
