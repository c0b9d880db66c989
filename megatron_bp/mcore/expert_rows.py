"""Says whether the statistics of a mixture of experts may count every row of every rank.

Megatron can leave rows out of its auxiliary loss, but not everywhere: its z-loss averages ranks,
and its expert bias cannot (0.19.2 fails on the shapes). Knows plans only. Specified by
tests/mcore/test_expert_rows.py.
"""

from megatron_bp.layout.plan import RankPlan


def every_row_counts(plan: RankPlan) -> bool:
    """Returns whether no rank has padding rows, or clean rows that another rank has too.

    The same on all ranks: they have equally many rows, so that together they have more than the
    sample has if any row is padding or is held twice.
    """
    request = plan.request
    real = (1 + request.num_views) * request.length
    return plan.rows.num_rows * request.num_ranks == real
