"""Checks training steps over real wires: layouts on the ranks of a job against one process.

The exactness check of exactness.py, on the devices there are: NCCL between GPUs, gloo without. The
dense reference of each problem comes from a file, since it is computed on a CPU. Used by
tools/check_wires.py; specified by tests/tools/test_check_wires.py.
"""

import argparse
import logging
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer import transformer_block
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.training.global_vars import _set_timers

from megatron_bp.mcore.cpu import mark_torch_norms
from megatron_bp.mcore.exactness import check
from megatron_bp.mcore.exactness_problem import (
    FullPrecisionSoftmax,
    Layout,
    Problem,
    start_layout,
)
from megatron_bp.mcore.exactness_reference import Reference, compute_reference

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
# Relative to a gradient's largest value. bf16 has no fixed bound, see `inexact`.
TOLERANCE = {"fp64": 1e-10, "fp32": 2e-5}

CSBP2 = Layout(context=2, block=2)
LAYOUTS = {
    1: {"one": Layout()},
    2: {
        "csbp2": CSBP2,
        "bp2": Layout(block=2),
        "cp2": Layout(context=2),
        "csbp2_recompute": replace(CSBP2, recompute="full"),
        "tp2": Layout(tensor=2),
        "tp2_sp": Layout(tensor=2, sequence_parallel=True),
        "pp2": Layout(pipeline=2),
        "dp2": Layout(data=2),
        "ep2": Layout(data=2, expert=2),
        "csbp2_ep2": replace(CSBP2, expert=2),
    },
    4: {
        "csbp4": Layout(context=4, block=4),
        "hybrid4x2": Layout(context=2, block=4),
        "tp2_csbp2": replace(CSBP2, tensor=2, sequence_parallel=True),
        "pp2_csbp2": replace(CSBP2, pipeline=2),
        "dp2_csbp2": replace(CSBP2, data=2),
        "ep2_csbp2": replace(CSBP2, data=2, expert=2),
    },
}
PROBLEMS = {
    "standard": Problem(num_samples=4),
    "fast_dllm_v2": Problem(
        objective="fast_dllm_v2", clean_rule="block_causal", window=7, num_samples=4
    ),
    "experts": Problem(num_experts=4, num_samples=4),
}


def write_references(path: Path, dtypes: Sequence[str] = ("fp64", "fp32")) -> None:
    """Computes the dense reference of every problem in every dtype, on the CPU, to a file."""
    found = {}
    one_process()
    with FullPrecisionSoftmax():
        for dtype in dtypes:
            torch.set_default_dtype(DTYPES[dtype])
            for name, problem in PROBLEMS.items():
                reference = compute_reference(replace(problem, dtype=DTYPES[dtype]))
                found[name, dtype] = asdict(reference)
    torch.save(found, path)


def one_process() -> None:
    """Starts the groups of a process by itself, if nothing did."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    start_layout(Layout())


def run_layouts(
    path: Path, dtypes: Iterable[str], problems: Iterable[str], names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Checks layouts of this job's world size: a row for each, and problem and dtype; collective.

    `names` empty: all of them. Layouts that deal experts take the problem that has some only;
    Megatron refuses experts under tensor without sequence parallelism.
    """
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    _set_timers(argparse.Namespace(timing_log_level=0, timing_log_option="minmax"))
    stored = torch.load(path, weights_only=False)
    layouts = LAYOUTS[dist.get_world_size()]
    # Transformer Engine's norm, which Megatron puts behind the last layer, has no fp64; torch's
    # has no sequence-parallel mark until it is given one.
    mark_torch_norms()
    torch_norm = mock.patch.object(transformer_block, "LayerNormImpl", WrappedTorchNorm)
    with FullPrecisionSoftmax(), torch_norm:
        for name in names or list(layouts):
            start_layout(layouts[name])
            for problem in problems:
                if not _fits(layouts[name], PROBLEMS[problem]):
                    continue
                for dtype in dtypes:
                    exact = "fp32" if dtype == "fp32" else "fp64"
                    reference = Reference(**stored[problem, exact])
                    yield _row(name, layouts[name], problem, dtype, reference)


def _fits(layout: Layout, problem: Problem) -> bool:
    if problem.num_experts:
        # A router that runs again in backward escapes FullPrecisionSoftmax: 1e-7.
        return layout.recompute == "none" and (layout.tensor == 1 or layout.sequence_parallel)
    return layout.expert == 1


def _row(
    name: str, layout: Layout, problem: str, dtype: str, reference: Reference
) -> dict[str, Any]:
    # Megatron divides counts of tokens in the default dtype; fp32 would round at 1e-8.
    torch.set_default_dtype(DTYPES["fp64" if dtype == "bf16" else dtype])
    begin = time.perf_counter()
    result = check(replace(PROBLEMS[problem], dtype=DTYPES[dtype]), layout, reference)
    return {
        "layout": name,
        "problem": problem,
        "dtype": dtype,
        **asdict(result),
        "seconds": round(time.perf_counter() - begin, 2),
    }


def inexact(rows: Iterable[dict[str, Any]], one_rank: Iterable[dict[str, Any]]) -> list[str]:
    """What is not exact: over the tolerance, and over 1.5 times the error of one rank.

    A device may round more than the tolerance by itself (Megatron's rotary table is fp32, and a
    GPU's cosines are not a CPU's), and bf16 has none: rows are compared with those of `one_rank`,
    which are not judged in bf16. A row in bf16 without one to compare with is not exact.
    """
    alone = {(row["problem"], row["dtype"]): row["grad_error"] for row in one_rank}
    bad = []
    for row in rows:
        key = row["problem"], row["dtype"]
        if row["layout"] == "one" and row["dtype"] not in TOLERANCE:
            continue
        limits = [TOLERANCE[row["dtype"]]] if row["dtype"] in TOLERANCE else []
        limits += [1.5 * alone[key]] if key in alone else []
        limit = max(limits, default=float("nan"))
        if not max(row["grad_error"], row["loss_error"]) <= limit:
            bad.append(f"{row['layout']} {' '.join(key)}: {row['grad_error']:.1e} > {limit:.1e}")
    return bad
