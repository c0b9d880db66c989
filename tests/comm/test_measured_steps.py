"""Whole training steps of Megatron's model send for keys and values what is counted for the run.

The production path (model, schedules, recomputation) on 4 ranks, which are two data ranks where a
layout needs two; calls of the package's own collectives are counted, Megatron's pass.
"""

import argparse
import logging
import warnings
from dataclasses import replace
from typing import Any

import torch

from megatron_bp.layout.model_shape import AttentionShape, LayerKind, ModelShape
from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology
from megatron_bp.layout.traffic import context_collectives
from tests.comm.counting import counted
from tests.distributed import run_distributed

RANKS, WINDOW, ELEMENT_BYTES = 4, 7, 8  # fp64
RECOMPUTE = {
    ("none", "rerun"): Recompute.NONE,
    ("full", "rerun"): Recompute.FULL,
    ("full", "keep"): Recompute.FULL_KEEP_ATTENTION,
}


def cases() -> list[tuple[Any, Any]]:
    """Problems and layouts of the exactness check."""
    from megatron_bp.mcore.exactness_cases import MODES
    from megatron_bp.mcore.exactness_problem import Problem

    plain, windowed = Problem(), Problem(window=WINDOW, objective="fast_dllm_v2")
    csbp = MODES["csbp2"]
    found = [(problem, mode) for problem in (plain, windowed) for mode in MODES.values()]
    found += [
        (windowed, replace(csbp, recompute="full")),
        (windowed, replace(csbp, clean_kv="regather")),
        (windowed, replace(csbp, recompute="full", recompute_attention="keep")),
        (
            windowed,
            replace(csbp, recompute="full", recompute_attention="keep", clean_kv="regather"),
        ),
        (windowed, replace(csbp, knobs=(("bp_windowed_exchange", False),))),
        (windowed, replace(csbp, knobs=(("bp_ownership", "contiguous"),))),
        (windowed, replace(csbp, tensor=2)),
        (replace(plain, num_samples=4), replace(csbp, pipeline=2)),
        (replace(windowed, num_samples=4), csbp),
        (windowed, replace(MODES["csbp4"], knobs=(("bp_hierarchical_gather", 2),))),
    ]
    return [(x, y if y.world_size == RANKS else replace(y, data=2)) for x, y in found]


def run_of(problem: Any, layout: Any) -> Run:
    """The same step as a run: two layers of 4 query heads and 2 key heads of 8."""
    from megatron_bp.layout.owners import Ownership
    from megatron_bp.mcore.exactness_problem import rules_of

    objective, knobs = rules_of(problem).objective, dict(layout.knobs)
    kinds = [LayerKind(AttentionShape(4, 2, 8, window), 48) for window in (problem.window, 0)]
    micro_batch = 1 if layout.pipeline > 1 else problem.num_samples // layout.data
    return Run(
        ModelShape("two layers", 32, 64, ((kinds[0], 1), (kinds[1], 1))),
        BatchShape(
            problem.length,
            problem.block_size,
            objective.num_views,
            objective.clean_rule,
            objective.corrupted_rule,
            micro_batch,
            problem.num_samples,
        ),
        Topology(
            tensor=layout.tensor,
            context=layout.num_ranks,
            shards=layout.context,
            pipeline=layout.pipeline,
            data=layout.data,
            block_owned=layout.block > 1,
            ownership=Ownership(knobs.get("bp_ownership", "dual_end")),
            windowed_exchange=knobs.get("bp_windowed_exchange", True),
        ),
        Policy(
            RECOMPUTE[layout.recompute, layout.recompute_attention],
            keep_gathered=layout.clean_kv == "keep",
            element_bytes=ELEMENT_BYTES,
            grad_wire_bytes=ELEMENT_BYTES,
        ),
    )


def _worker(rank: int, num_ranks: int) -> list[tuple[int, float]]:
    from megatron_bp.mcore import cpu

    if not torch.cuda.is_available():
        cpu.enable_cpu()
    from megatron.training.global_vars import _set_timers

    from megatron_bp.mcore.exactness import check
    from megatron_bp.mcore.exactness_problem import Layout, start_layout
    from megatron_bp.mcore.exactness_reference import compute_reference

    torch.set_default_dtype(torch.float64)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    _set_timers(argparse.Namespace(timing_log_level=0, timing_log_option="minmax"))
    start_layout(Layout(data=num_ranks))
    todo = cases()
    references = {
        problem: compute_reference(problem) for problem in dict.fromkeys(p for p, _ in todo)
    }
    found = []
    for problem, layout in todo:
        start_layout(layout)
        with counted(caller="megatron_bp.comm") as sent:
            result = check(problem, layout, references[problem])
        found.append((sum(x.total for x in sent), result.grad_error))
    return found


def test_a_step_sends_the_keys_and_values_that_are_counted_for_it() -> None:
    found = run_distributed(_worker, RANKS, timeout=300.0)
    for number, (problem, layout) in enumerate(cases()):
        sent = [of_rank[number][0] for of_rank in found]
        want = sum(c.step_bytes for c in context_collectives(run_of(problem, layout)))
        assert sum(sent) / RANKS == want, (problem, layout)
        assert (want > 0) == (layout.context > 1)
        assert max(of_rank[number][1] for of_rank in found) < 1e-10
