"""Layer specifications to name on a command line: `--spec megatron_bp.mcore.spec gpt_layer`, or by
`--cp-comm-type block_parallel` in a patched Megatron (patches/).

Megatron's own specification with our core attention in it, in any script that builds its model
from `GPTModelConfig` (pretrain_gpt.py from 0.19 on). For batches without a plan, next-token data
and inference, the model is stock Megatron bit for bit. Specified by
tests/mcore/test_launch.py and tests/test_patches.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any


def gpt_layer(config: Any, vp_stage: int | None = None) -> Any:
    """Returns the specification of a GPT model's layers, local or Transformer Engine.

    Raises: TypeError if Megatron's own is not made of plain transformer layers.
    """
    # Imported here: Megatron takes a --spec that fails to import for no --spec at all.
    from megatron_bp.mcore.model import layer_spec

    return layer_spec(config, vp_stage)


def with_block_parallel(submodules: Any) -> Any:
    """Returns the submodules of a self-attention, with our core attention in its seat.

    What `--cp-comm-type block_parallel` calls for each layer, whatever its specification is.
    """
    from megatron_bp.mcore.model import in_the_seat_of

    return replace(submodules, core_attention=in_the_seat_of(submodules.core_attention))
