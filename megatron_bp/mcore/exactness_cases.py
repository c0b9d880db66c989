"""The cases of the exactness check, and the process that runs those of one world size.

Used by tools/check_exact.py; specified by tests/tools/test_check_exact.py.
"""

import argparse
import itertools
import json
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training.global_vars import _set_timers

from megatron_bp.mcore.exactness import Result, check
from megatron_bp.mcore.exactness_formulas import FORMULAS
from megatron_bp.mcore.exactness_problem import (
    FullPrecisionSoftmax,
    Layout,
    Problem,
    start_layout,
)
from megatron_bp.mcore.exactness_reference import compute_reference

Case = tuple[str, Problem, Layout]

TOLERANCE = {"fp64": 1e-10, "fp32": 2e-5}
DTYPE = {"fp64": torch.float64, "fp32": torch.float32}

MODES = {
    "csbp2": Layout(context=2, block=2),
    "csbp4": Layout(context=4, block=4),
    "bp2": Layout(block=2),
    "bp4": Layout(block=4),
    "hybrid4x2": Layout(context=2, block=4),
    "cp2": Layout(context=2),
    "cp4": Layout(context=4),
}
# What is tried with many objectives: conventional context parallelism on two ranks suffices.
FEWER_MODES = [layout for name, layout in MODES.items() if name != "cp4"]
CSBP2 = MODES["csbp2"]
# Layers that run twice take attention from their first run, and gather again for backward.
KEEP = replace(CSBP2, recompute="full", recompute_attention="keep", clean_kv="regather")
REGATHER = replace(CSBP2, clean_kv="regather")
VPP = replace(CSBP2, pipeline=2, virtual=2)

# Shorter than a block, one block, over all ranks, one token, many blocks; then padding.
DOCUMENTS = Problem(packed=True, documents=(3, 4, 33, 1, 12))


def _document_cases(world_size: int) -> list[tuple[Problem, Layout]]:
    """Packed documents against each of them trained alone, on so many processes."""
    problems = [
        replace(DOCUMENTS, objective=objective, clean_rule=rule, window=window)
        for objective, rule, window in (
            ("standard", "token_causal", 0),
            ("standard", "block_causal", 7),
            ("fast_dllm_v2", "block_causal", 0),
            ("nemotron_labs", "preset", 0),
        )
    ]
    layouts = [
        Layout(),
        *FEWER_MODES,
        replace(CSBP2, strategy="interval"),
        replace(CSBP2, tensor=2),
        replace(CSBP2, tensor=2, sequence_parallel=True),
        replace(CSBP2, pipeline=2),
        replace(CSBP2, data=2),
        replace(CSBP2, recompute="full"),
    ]
    whole = [(problem, layout) for problem in problems for layout in layouts]
    short = replace(DOCUMENTS, length_multiple=8)
    ragged = [(short, layout) for layout in (Layout(), *FEWER_MODES, replace(CSBP2, pipeline=2))]
    return [case for case in (*whole, *ragged) if case[1].world_size == world_size]


OTHERS = {
    "one": [(Problem(), Layout())],
    "tp2_csbp2": [(Problem(), replace(CSBP2, tensor=2))],
    "tp2_sp_csbp2": [
        (Problem(objective=o), replace(CSBP2, tensor=2, sequence_parallel=True))
        for o in ("standard", "fast_dllm_v2")
    ],
    "pp2_csbp2": [
        (Problem(objective=o, num_samples=4), replace(CSBP2, pipeline=2))
        for o in ("standard", "fast_dllm_v2")
    ],
    "dp2_csbp2": [
        (Problem(per_token=per_token, few_targets=few), replace(CSBP2, data=2))
        for per_token in (False, True)
        for few in (False, True)
    ],
    "recompute_csbp2": [
        (Problem(window=7), replace(CSBP2, recompute=kind)) for kind in ("full", "selective")
    ],
    "keep": [
        (Problem(num_samples=samples, objective=objective, window=window), layout)
        for samples, objective, window, layout in (
            (2, "standard", 7, replace(KEEP, clean_kv="keep")),
            (2, "standard", 7, KEEP),
            (2, "fast_dllm_v2", 0, replace(KEEP, context=1)),
            (2, "standard", 0, replace(KEEP, block=1)),
            (2, "standard", 0, replace(KEEP, tensor=2, sequence_parallel=True)),
            (4, "standard", 7, replace(KEEP, pipeline=2)),
            (4, "fast_dllm_v2", 0, replace(KEEP, pipeline=2, clean_kv="keep")),
        )
    ],
    "regather": [
        (Problem(num_samples=2 * layout.pipeline, objective=objective, window=window), layout)
        for objective, window, layout in (
            ("standard", 7, REGATHER),
            ("fast_dllm_v2", 0, replace(REGATHER, strategy="interval")),
            ("standard", 7, replace(REGATHER, context=2, block=4)),
            ("standard", 0, replace(REGATHER, block=1)),
            ("standard", 7, replace(REGATHER, recompute="selective")),
            ("standard", 0, replace(REGATHER, pipeline=2)),
        )
    ],
    "packed": [
        (Problem(packed=True, clean_rule=rule, window=window, objective=objective), layout)
        for rule, window in (("token_causal", 0), ("block_causal", 7))
        for objective in ("standard", "fast_dllm_v2")
        for layout in (CSBP2, MODES["bp2"], MODES["cp2"], MODES["csbp4"])
    ],
    "moe": [
        (Problem(num_experts=4, num_samples=1, objective=objective), layout)
        for objective in ("standard", "fast_dllm_v2")
        for layout in (CSBP2, MODES["bp2"])
    ],
    "experts": [
        (Problem(num_experts=4, num_samples=samples, objective=objective), layout)
        for samples, objective, layout in (
            (1, "standard", replace(CSBP2, expert=2)),
            (2, "fast_dllm_v2", replace(MODES["bp2"], expert=2)),
            (2, "nemotron_labs", replace(CSBP2, expert=2, overlap=True)),
            (1, "standard", replace(KEEP, expert=2)),
            (1, "standard", replace(MODES["csbp4"], expert=2)),
            (1, "fast_dllm_v2", replace(MODES["hybrid4x2"], expert=4)),
            (2, "standard", replace(CSBP2, data=2, expert=4)),
            (1, "fast_dllm_v2", replace(CSBP2, tensor=2, sequence_parallel=True, expert=2)),
            (4, "standard", replace(CSBP2, pipeline=2, expert=2)),
        )
    ],
    "balance": [
        (Problem(num_experts=4, num_samples=1, **given), layout)
        for given, layout in (
            ({"balance": "seq_aux_loss"}, replace(CSBP2, expert=2)),
            ({"balance": "global_aux_loss", "objective": "fast_dllm_v2"}, MODES["bp2"]),
            ({"z_loss": 0.1}, replace(CSBP2, expert=2)),
            ({"expert_bias": True}, replace(CSBP2, expert=2)),
            ({"length": 61}, replace(CSBP2, expert=2)),
        )
    ],
    "vpp2_pp2_csbp2": [
        (Problem(num_layers=4, num_samples=4, objective=objective, window=window), layout)
        for objective, window, layout in (
            ("standard", 7, VPP),
            ("nemotron_labs", 0, replace(VPP, overlap=True)),
            ("standard", 7, replace(VPP, clean_kv="regather")),
            ("fast_dllm_v2", 0, replace(KEEP, pipeline=2, virtual=2)),
            ("standard", 0, replace(VPP, recompute="full")),
        )
    ],
    "overlap": [
        (Problem(num_samples=2 * layout.data, objective=objective), layout)
        for objective, layout in (
            ("standard", replace(CSBP2, overlap=True)),
            ("fast_dllm_v2", replace(CSBP2, data=2, overlap=True)),
            ("standard", replace(MODES["bp2"], data=2, overlap=True)),
            ("standard", replace(CSBP2, tensor=2, sequence_parallel=True, overlap=True)),
        )
    ],
    "ablations": [
        (Problem(window=window, objective=objective), replace(MODES[mode], knobs=(knob,)))
        for knob, modes in (
            (("bp_ownership", "contiguous"), ("csbp2", "csbp4", "hybrid4x2", "cp2")),
            (("bp_overlap", False), ("csbp2", "cp2")),
            (("bp_windowed_exchange", False), ("csbp4", "cp2")),
            (("bp_hierarchical_gather", 2), ("csbp4", "cp4")),
        )
        for mode in modes
        for window, objective in ((0, "standard"), (7, "fast_dllm_v2"))
    ],
    "ragged": [(Problem(length=61, window=w), x) for w in (0, 7) for x in MODES.values()],
    "presets": [
        (Problem(objective=o, clean_rule="preset", few_targets=few, num_samples=2), layout)
        for o in FORMULAS
        for few, layout in (
            (False, Layout()),
            *((few, layout) for few in (False, True) for layout in FEWER_MODES),
            (False, replace(CSBP2, tensor=2, sequence_parallel=True)),
            (False, replace(CSBP2, pipeline=2)),
        )
    ],
    "presets_packed": [
        (Problem(objective=o, clean_rule="preset", packed=True, per_token=per_token), layout)
        for o, per_token in (
            *((name, False) for name in FORMULAS),
            ("nemotron_labs", True),
            ("llada2", True),
        )
        for layout in (CSBP2, MODES["bp4"])
    ],
    "documents1": _document_cases(1),
    "documents2": _document_cases(2),
    "documents4": _document_cases(4),
    "odd_blocks": [(Problem(length=52), layout) for layout in MODES.values()],
}


def cases(names: Sequence[str], dtype: torch.dtype) -> list[Case]:
    """All cases of the named layouts."""
    found = []
    for name in names:
        if name in MODES:
            axes = itertools.product(
                ("standard", "fast_dllm_v2"),
                ("token_causal", "block_causal"),
                (0, 7),
                ("native", "interval"),
            )
            pairs = [
                (Problem(objective=o, clean_rule=r, window=w), replace(MODES[name], strategy=s))
                for o, r, w, s in axes
            ]
        else:
            pairs = OTHERS[name]
        found += [(name, replace(problem, dtype=dtype), layout) for problem, layout in pairs]
    return found


def run_cases(rank: int, todo: Sequence[Case], folder: str, broken: bool) -> None:
    """Runs the cases of one world size as `rank`; rank 0 prints them and writes FOLDER/rows.json.

    `broken` drops one rank's share of every reduce-scatter, which the check must notice.
    """
    torch.set_num_threads(1)
    # Megatron divides counts of tokens in the default dtype; fp32 would round at 1e-8.
    torch.set_default_dtype(todo[0][1].dtype)
    logging.disable(logging.WARNING)  # one line a case; Megatron lists every parameter each time
    warnings.simplefilter("ignore")
    world = todo[0][2].world_size
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world
    )
    _set_timers(argparse.Namespace(timing_log_level=0, timing_log_option="minmax"))
    start_layout(Layout(data=world))
    if broken:
        drop_a_share()
    rows = []
    with FullPrecisionSoftmax():
        problems = dict.fromkeys(problem for _, problem, _ in todo)
        references = {problem: compute_reference(problem) for problem in problems}
        by_groups = sorted(todo, key=lambda case: case[2].degrees)
        for _, cases_of in itertools.groupby(by_groups, key=lambda case: case[2].degrees):
            same_groups = list(cases_of)
            start_layout(same_groups[0][2])
            for name, problem, layout in same_groups:
                begin = time.perf_counter()
                result = check(problem, layout, references[problem])
                rows.append(_row(name, problem, layout, result, time.perf_counter() - begin))
                if rank == 0:
                    print(_line(rows[-1]), flush=True)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _row(
    name: str, problem: Problem, layout: Layout, result: Result, seconds: float
) -> dict[str, Any]:
    dtype = str(problem.dtype).removeprefix("torch.")
    row = {"name": name, **asdict(problem), **asdict(layout), **asdict(result)}
    return {**row, "dtype": dtype, "seconds": round(seconds, 3)}


def _line(row: dict[str, Any]) -> str:
    plain = {**asdict(Problem()), **asdict(Layout())}
    differs = [f"{k}={row[k]}" for k, v in plain.items() if k != "dtype" and row[k] != v]
    return (
        f"{row['name']:16s} loss error {row['loss_error']:.1e}  gradient error "
        f"{row['grad_error']:.1e}  {' '.join(differs)}"
    )


def drop_a_share() -> None:
    """Makes every reduce-scatter lose the share of the group's last rank."""
    whole = dist.reduce_scatter_tensor

    def broken(out: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = kwargs["group"]
        if group.rank() == group.size() - 1:
            tensor = torch.zeros_like(tensor)
        return whole(out, tensor, *args, **kwargs)

    dist.reduce_scatter_tensor = broken  # type: ignore[assignment]
