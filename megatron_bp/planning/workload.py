"""Turns what a user asks for (model, objective, length, GPUs) into a batch and a cluster.

The objectives' shapes are repeated here because planning does not import objectives;
tests/planning/test_workload.py holds them equal.
"""

from dataclasses import dataclass
from types import MappingProxyType

from megatron_bp.layout.model_shape import ModelShape
from megatron_bp.layout.run_shape import BatchShape
from megatron_bp.layout.visibility import CleanRule
from megatron_bp.planning.cluster import Cluster


@dataclass(frozen=True)
class ObjectiveShape:
    """What of an objective decides its cost; `target_share` is the mean noise level."""

    num_views: int = 1
    clean_rule: CleanRule = CleanRule.BLOCK_CAUSAL
    learns_clean: bool = False
    target_share: float = 0.5


OBJECTIVES = MappingProxyType(
    {
        "standard": ObjectiveShape(clean_rule=CleanRule.TOKEN_CAUSAL),
        "bd3lm": ObjectiveShape(),
        "fast_dllm_v2": ObjectiveShape(num_views=2),
        "sdar": ObjectiveShape(),
        "llada2": ObjectiveShape(),
        "nemotron_labs": ObjectiveShape(clean_rule=CleanRule.TOKEN_CAUSAL, learns_clean=True),
    }
)


@dataclass(frozen=True)
class Workload:
    """What is to be planned. `global_batch` samples a step; `world` GPUs."""

    model: ModelShape
    objective: str
    length: int
    block_size: int
    world: int
    global_batch: int
    cluster: Cluster

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)} must be at least 1."
            for name in ("length", "block_size", "world", "global_batch")
            if getattr(self, name) < 1
        ]
        if self.objective not in OBJECTIVES:
            problems.append(
                f"objective {self.objective!r} is unknown; use one of {', '.join(OBJECTIVES)}."
            )
        if problems:
            raise ValueError(" ".join(problems))

    def batch(self, micro_batch: int) -> BatchShape:
        """The batch with `micro_batch` samples at a time."""
        shape = OBJECTIVES[self.objective]
        return BatchShape(
            length=self.length,
            block_size=self.block_size,
            num_views=shape.num_views,
            clean_rule=shape.clean_rule,
            micro_batch=micro_batch,
            global_batch=self.global_batch,
            target_share=shape.target_share,
            learns_clean=shape.learns_clean,
        )
