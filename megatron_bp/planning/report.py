"""Formats the result of a search as text: the best runs, and why the others are not.

Specified by tests/planning/test_report.py.
"""

import shlex
from dataclasses import fields

from megatron_bp.layout.flops import needed_flops
from megatron_bp.planning.hardware import GIB
from megatron_bp.planning.launch_flags import launch_flags, unlaunchable
from megatron_bp.planning.predict import StepTime
from megatron_bp.planning.search import Candidate, Found, describe
from megatron_bp.planning.workload import Workload


def utilisation(candidate: Candidate, workload: Workload) -> float:
    """Operations the objective needs, over seconds, GPUs and peak."""
    seconds = candidate.step.total * workload.world
    return needed_flops(candidate.run) / seconds / workload.cluster.hardware.peak_tflops / 1e12


def heading(workload: Workload, found: Found) -> str:
    """What was searched, and which of the numbers are assumptions."""
    model, gpu = workload.model, workload.cluster.hardware
    lines = [
        f"{model.name} ({model.num_parameters / 1e9:.2f} B parameters), {workload.objective}, "
        f"L {workload.length}, block {workload.block_size}, {workload.world} x {gpu.name}, "
        f"{workload.cluster.node_size} a node, global batch {workload.global_batch}",
        f"source of the shape: {model.source}" if model.source else "",
        f"{found.num_tried} combinations, {found.num_fitting} fit into "
        f"{gpu.memory_gib - gpu.reserve_gib:.0f} GiB ({gpu.memory_gib:.0f} less "
        f"{gpu.reserve_gib:.0f} in reserve)",
        *(f"assumed: {what}" for what in (*model.assumed, *gpu.assumed)),
    ]
    return "\n".join(line for line in lines if line)


def table(found: Found, workload: Workload) -> str:
    """One line for each of the best runs."""
    lines = [
        f"{'step s':>9}{'tok/s':>11}{'tok/s/GPU':>11}{'MFU':>6}{'GiB':>7}{'exposed s':>11}"
        f"{'bubble s':>10}  run"
    ]
    for candidate in found.best:
        step, rate = candidate.step, candidate.tokens_per_second
        run = candidate.run
        lines.append(
            f"{step.total:9.3f}{rate:11.0f}{rate / workload.world:11.1f}"
            f"{utilisation(candidate, workload):6.2f}{candidate.memory.total / GIB:7.1f}"
            f"{step.exposed:11.3f}{step.bubble:10.3f}  "
            f"{describe(run.topology, run.batch.micro_batch, run.policy)}"
        )
    return "\n".join(lines)


def flags_text(candidate: Candidate, workload: Workload) -> str:
    """The flags of a run on one line, or why there are none."""
    reasons = unlaunchable(workload.model)
    if reasons:
        return "no flags: " + "; ".join(reasons)
    return shlex.join(launch_flags(candidate.run, workload.objective, workload.cluster))


def memory_text(candidate: Candidate) -> str:
    """The parts of a run's memory, in GiB."""
    parts = vars(candidate.memory)
    return ", ".join(f"{name} {value / GIB:.1f}" for name, value in parts.items())


def differences(step: StepTime, best: StepTime) -> str:
    """The largest parts that a step spends more than the best one."""
    more = {f.name: getattr(step, f.name) - getattr(best, f.name) for f in fields(step)}
    parts = sorted((value, name) for name, value in more.items() if value > 0.002 * best.total)
    if not parts:
        return "many small parts"
    return ", ".join(f"{name} +{value:.2f} s" for value, name in reversed(parts))


def why(found: Found) -> str:
    """What each mode's fastest run loses against the best, and what rules out the rest."""
    if not found.best:
        lines = ["nothing fits:"]
    else:
        best = found.best[0]
        lines = ["the fastest run of each mode, and what it spends more than the best:"]
        for one in found.modes:
            slower = one.step.total / best.step.total - 1
            run = one.run
            name = describe(run.topology, run.batch.micro_batch, run.policy)
            reason = "the best" if slower == 0 else differences(one.step, best.step)
            lines.append(f"  {run.topology.mode:9}{100 * slower:+7.1f} %  {name}: {reason}")
    lines.append("ruled out:")
    for refusal in sorted(found.refused, key=lambda r: (-r.count, r.mode)):
        near = f"; nearest by {refusal.excess:.1f} GiB" if refusal.excess else "; for example"
        lines.append(
            f"  {refusal.mode:9}{refusal.count:7}  {refusal.reason}{near}: {refusal.example}"
        )
    return "\n".join(lines)
