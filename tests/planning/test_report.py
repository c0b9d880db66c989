"""The report names the best run, its flags, its assumptions, and what rules others out."""

from dataclasses import replace

import pytest

from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import H200
from megatron_bp.planning.predict import StepTime
from megatron_bp.planning.report import (
    differences,
    heading,
    memory_text,
    table,
    utilisation,
    why,
)
from megatron_bp.planning.search import Found, search
from megatron_bp.planning.shapes import model_named
from megatron_bp.planning.workload import Workload

WORKLOAD = Workload(model_named("nemotron-8b"), "standard", 131072, 32, 8, 8, Cluster(H200))


@pytest.fixture(scope="module")
def found() -> Found:
    return search(WORKLOAD, num_best=3)


def test_the_heading_says_what_is_assumed(found: Found) -> None:
    text = heading(WORKLOAD, found)
    assert "nemotron-8b (8.49 B parameters), standard, L 131072, block 32, 8 x h200" in text
    assert "assumed: network: 0.85 of one 400 Gb/s port a GPU" in text
    assert f"{found.num_tried} combinations, {found.num_fitting} fit into 131 GiB" in text


def test_the_table_has_a_line_for_each_run(found: Found) -> None:
    lines = table(found, WORKLOAD).splitlines()
    assert len(lines) == 4
    assert "CSBP" in lines[1]
    assert f"{found.best[0].step.total:9.3f}" in lines[1]


def test_utilisation_is_needed_work_over_peak(found: Found) -> None:
    first, second = (utilisation(candidate, WORKLOAD) for candidate in found.best[:2])
    assert 0.3 < second <= first < 0.7


def test_why_explains_every_mode_and_every_refusal(found: Found) -> None:
    text = why(found)
    assert text.count("\n") == 1 + len(found.modes) + len(found.refused)
    assert "the best" in text
    assert "exposed_" in text
    assert "does not fit into memory; nearest by" in text


def test_why_says_that_nothing_fits() -> None:
    small = replace(WORKLOAD, cluster=Cluster(replace(H200, memory_gib=9.0)))
    assert why(search(small)).startswith("nothing fits:\nruled out:")


def test_differences_name_the_largest_parts_first() -> None:
    slow, best = StepTime(matrices=3.0, bubble=5.0), StepTime(matrices=2.0, bubble=1.0)
    assert differences(slow, best) == "bubble +4.00 s, matrices +1.00 s"
    assert differences(best, best) == "many small parts"


def test_memory_is_listed_by_part(found: Found) -> None:
    text = memory_text(found.best[0])
    assert text.startswith("parameters 15.8, gradients ")
    assert "logits" in text
