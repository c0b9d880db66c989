"""Objectives cost what the package's objectives decide."""

import pytest

from megatron_bp.config import OBJECTIVES as NAMES
from megatron_bp.objectives.objective import PRESETS
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import H200
from megatron_bp.planning.shapes import model_named
from megatron_bp.planning.workload import OBJECTIVES, Workload


def test_every_objective_is_known() -> None:
    assert set(OBJECTIVES) == set(PRESETS) == set(NAMES) - {"none"}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_shapes_are_those_of_the_presets(name: str) -> None:
    shape, preset = OBJECTIVES[name], PRESETS[name]
    assert shape.num_views == preset.num_views
    assert shape.clean_rule is preset.clean_rule
    assert shape.learns_clean == preset.learns_clean
    assert shape.target_share == pytest.approx((preset.t_min + preset.t_max) / 2, abs=1e-3)


def test_a_batch_carries_them() -> None:
    workload = Workload(model_named("nemotron-3b"), "fast_dllm_v2", 4096, 32, 8, 16, Cluster(H200))
    batch = workload.batch(2)
    assert (batch.num_views, batch.micro_batch, batch.global_batch) == (2, 2, 16)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"world=0 must be at least 1\. objective 'ar' is unknown"):
        Workload(model_named("nemotron-3b"), "ar", 4096, 32, 0, 16, Cluster(H200))
