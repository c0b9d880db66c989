"""Makes the objective of a run from its flags. Knows no process group.

Specified by tests/mcore/test_choices.py.
"""

from __future__ import annotations

import argparse

from megatron_bp.config import BlockParallelConfig
from megatron_bp.objectives.objective import Objective, Scope, make_objective


def objective_of(args: argparse.Namespace, config: BlockParallelConfig) -> Objective:
    """Returns the preset of --bdlm-objective with the choices that flags replace.

    Megatron's --calculate-per-token-loss is the choice of one denominator for the whole batch.
    Raises: ValueError for choices that do not fit together.
    """
    scope = Scope.GLOBAL if args.calculate_per_token_loss else Scope.EXAMPLE
    return make_objective(config.bdlm_objective, scope=str(scope), **config.objective_choices())
