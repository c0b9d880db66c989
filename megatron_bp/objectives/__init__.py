"""Block-diffusion objectives: what is masked, what is learned, and the loss over target rows."""

from megatron_bp.objectives.loss import (
    LOCAL,
    LossOptions,
    linear_cross_entropy,
    weighted_cross_entropy,
)
from megatron_bp.objectives.noise import Corruption, corrupt
from megatron_bp.objectives.objective import (
    Normalizer,
    Objective,
    TSampling,
    Weight,
    make_objective,
)

__all__ = [
    "LOCAL",
    "Corruption",
    "LossOptions",
    "Normalizer",
    "Objective",
    "TSampling",
    "Weight",
    "corrupt",
    "linear_cross_entropy",
    "make_objective",
    "weighted_cross_entropy",
]
