"""Layer specifications to name on a command line: `--spec megatron_bp.mcore.spec gpt_layer`.

Megatron's own specification with our core attention in it, in any script that builds its model
from `GPTModelConfig` (pretrain_gpt.py from 0.19 on). For batches without a plan, next-token data
and inference, the model is stock Megatron bit for bit. Specified by tests/mcore/test_spec.py.
"""

from __future__ import annotations

from typing import Any


def gpt_layer(config: Any, vp_stage: int | None = None) -> Any:
    """Returns the specification of a GPT model's layers, local or Transformer Engine.

    Raises: TypeError if Megatron's own is not made of plain transformer layers.
    """
    # Imported here: Megatron takes a --spec that fails to import for no --spec at all.
    from megatron_bp.mcore.model import layer_spec

    return layer_spec(config, vp_stage)
