"""A Transformer Engine attention that asks the context gets block-parallel attention."""

import pytest
import torch

from megatron_bp.attention.block_parallel import AttentionOptions
from megatron_bp.attention.reference import reference_attention
from megatron_bp.attention.te_context import TeContext
from megatron_bp.comm.groups import BlockGroups
from megatron_bp.layout.plan import PlanRequest, make_plan

PLAN = make_plan(PlanRequest(length=24, block_size=4), 0)
CONTEXT = TeContext(PLAN, BlockGroups.single(), AttentionOptions(softmax_scale=0.3))


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(PLAN.rows.num_rows, 2, heads, 8, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    ]


def test_both_layouts_give_the_dense_answer() -> None:
    q, k, v = tensors()
    wanted = reference_attention(q, k, v, PLAN, 0.3).flatten(2)
    assert torch.allclose(CONTEXT.attend(q, k, v, "sbhd"), wanted, rtol=0, atol=1e-12)
    turned = CONTEXT.attend(*(x.transpose(0, 1) for x in (q, k, v)), "bshd")
    assert torch.allclose(turned, wanted.transpose(0, 1), rtol=0, atol=1e-12)


def test_other_layouts_are_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="qkv_format='thd' must be 'sbhd' or 'bshd'"):
        CONTEXT.attend(q, k, v, "thd")
    with pytest.raises(ValueError, match="with separate query, key and value layers"):
        CONTEXT.attend(q, None, None, "sbhd")
