"""What a Transformer Engine attention is given in the place of a context-parallel group.

For models built from Transformer Engine without Megatron, whose package is patched
(patches/transformer_engine): `layer.set_context_parallel_group(TeContext(...), None, None,
"block_parallel")` before each batch. Imports no Transformer Engine. Specified by
tests/attention/test_te_context.py.
"""

from dataclasses import dataclass

from torch import Tensor

from megatron_bp.attention.block_parallel import AttentionOptions, block_parallel_attention
from megatron_bp.comm.groups import BlockGroups
from megatron_bp.layout.plan import RankPlan


@dataclass(frozen=True, eq=False)
class TeContext:
    """The plan of a batch, its groups, and how a layer computes."""

    plan: RankPlan
    groups: BlockGroups
    options: AttentionOptions

    def attend(
        self, query: Tensor | None, key: Tensor | None, value: Tensor | None, qkv_format: str
    ) -> Tensor:
        """Returns the attention of this rank's rows, as Transformer Engine's attention does.

        Shapes: with sbhd query [T, Z, N, H], key and value [T, Z, M, H] -> [T, Z, N * H]; with
        bshd the first two axes are exchanged. Rows are in the order of the plan.
        Raises: ValueError for another format, or for packed Q, K and V.
        """
        if qkv_format not in ("sbhd", "bshd") or query is None or key is None or value is None:
            raise ValueError(
                f"qkv_format={qkv_format!r} must be 'sbhd' or 'bshd', with separate query, key and "
                "value layers; use qkv_format='sbhd' (packed documents are part of the plan)."
            )
        turn = qkv_format == "bshd"
        q, k, v = (x.transpose(0, 1) if turn else x for x in (query, key, value))
        out = block_parallel_attention(q, k, v, self.plan, self.groups, self.options).flatten(2)
        return out.transpose(0, 1) if turn else out
