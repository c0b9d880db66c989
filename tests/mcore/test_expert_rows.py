"""Statistics of experts count every row once, or a run that cannot is refused with a remedy."""

from __future__ import annotations

import itertools

import pytest

from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.mcore.arguments import config_from_args
from megatron_bp.mcore.expert_refusals import expert_problems
from megatron_bp.mcore.expert_rows import every_row_counts
from tests.mcore.parsing import parsed


@pytest.mark.parametrize("length", [61, 64])
@pytest.mark.parametrize("row_multiple", [1, 5])
@pytest.mark.parametrize(("num_ranks", "shards"), [(1, 1), (2, 2), (4, 4), (4, 2), (2, 1)])
def test_every_row_counts_exactly_if_no_rank_has_padding_or_another_ranks_rows(
    length: int, row_multiple: int, num_ranks: int, shards: int
) -> None:
    request = PlanRequest(
        length, 8, num_ranks=num_ranks, num_clean_shards=shards, row_multiple=row_multiple
    )
    plans = [make_plan(request, rank) for rank in range(num_ranks)]
    real = [
        (int(stream), int(position))
        for plan in plans
        for stream, position in zip(plan.rows.stream, plan.rows.position, strict=True)
    ]
    wanted = sorted(real) == sorted(itertools.product((0, 1), range(length)))
    assert {every_row_counts(plan) for plan in plans} == {wanted}


EXPERTS = "--num-experts 2"
SHARDED = "--context-parallel-size 2 --block-parallel-size 2"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("--calculate-per-token-loss", "drop --calculate-per-token-loss"),
        (
            "--moe-router-load-balancing-type sinkhorn",
            "other rows of its rank; use aux_loss",
        ),
        ("--moe-router-load-balancing-type quantile_balancing", "use aux_loss"),
        ("--moe-expert-capacity-factor 1.5", "drops rows by what else a rank has"),
        ("--moe-input-jitter-eps 0.1", "draws noise rank by rank"),
        (
            "--moe-z-loss-coeff 0.1 --block-parallel-size 2",
            "--moe-z-loss-coeff averages ranks as if they had equally many, but here ranks hold "
            "rows that must not count (padding, or clean rows that another rank has too); use "
            "--context-parallel-size 2",
        ),
        (
            "--moe-router-enable-expert-bias --block-parallel-size 2",
            "cannot leave rows out in Megatron, but here",
        ),
        (f"--moe-z-loss-coeff 0.1 {SHARDED} --seq-length 72", "use --seq-length 96"),
        (f"--moe-z-loss-coeff 0.1 {SHARDED} --seq-length 64 --reset-attention-mask", "drop it"),
    ],
)
def test_what_depends_on_the_layout_is_refused(text: str, wanted: str) -> None:
    args = parsed(f"{EXPERTS} {text}", num_ranks=2)
    (problem,) = expert_problems(args, config_from_args(args))
    assert wanted in problem


@pytest.mark.parametrize(
    "text",
    [
        "--moe-aux-loss-coeff 0.1 --block-parallel-size 2",
        "--moe-router-load-balancing-type seq_aux_loss --block-parallel-size 2",
        "--moe-z-loss-coeff 0.1",
        f"--moe-z-loss-coeff 0.1 --moe-router-enable-expert-bias --seq-length 64 {SHARDED}",
        "--moe-z-loss-coeff 0.1 --seq-length 64 --context-parallel-size 2",
        "--moe-z-loss-coeff 0.1 --bdlm-objective fast_dllm_v2",
    ],
)
def test_what_does_not_depend_on_it_is_accepted(text: str) -> None:
    args = parsed(f"{EXPERTS} {text}", num_ranks=2)
    assert expert_problems(args, config_from_args(args)) == []


def test_without_experts_nothing_is_asked() -> None:
    args = parsed("--moe-expert-capacity-factor 1.5 --calculate-per-token-loss")
    assert expert_problems(args, config_from_args(args)) == []
