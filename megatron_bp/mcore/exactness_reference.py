"""Loss and gradients of a tiny problem in one process: dense mask, full logits, plain formulas.

Shares only the layers' linear algebra with the production path. Specified by
tests/tools/test_check_exact.py.
"""

import zlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor, nn

from megatron_bp.attention.reference import reference_attention
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from megatron_bp.mcore.core_attention import layer_window
from megatron_bp.mcore.dataset import Sample
from megatron_bp.mcore.exactness_problem import (
    MASK_ID,
    VALID_VOCAB,
    VOCAB,
    Layout,
    Problem,
    gpt,
    local_spec,
    rules_of,
    samples_of,
    transformer_config,
)


@dataclass(frozen=True, eq=False)
class Reference:
    """Loss, gradients and parameters of the one-process reference, by parameter name."""

    loss: float
    grads: dict[str, Tensor]
    parameters: dict[str, Tensor]


class _DenseAttention(nn.Module):
    """The reference in the core-attention slot: one dense mask over clean and corrupted rows."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.window = layer_window(config, layer_number)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: RankPlan, **_: Any) -> Tensor:
        """Attention under the plan that comes in the place of the attention mask."""
        plan = make_plan(replace(mask.request, window=self.window), 0)
        return reference_attention(q, k, v, plan, self.scale).flatten(2)


class _DensePositions(nn.Module):
    """Rows of the stock rotary table at given positions."""

    def __init__(self, stock: Any, position: Tensor) -> None:
        super().__init__()
        self.stock, self.position = stock, position

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Unused length."""
        return len(self.position)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Angles of the rows."""
        table: Tensor = self.stock.get_emb(int(self.position.max()) + 1)
        return table[self.position]


def compute_reference(problem: Problem) -> Reference:
    """The reference of a problem; Megatron must be initialised without tensor or pipeline ranks."""
    config = transformer_config(problem, Layout())
    spec = local_spec(problem)
    spec.submodules.self_attention.submodules.core_attention = _DenseAttention
    model = gpt(config, spec, problem).to(problem.dtype)
    parameters = {}
    for name, parameter in model.named_parameters():
        parameters[name] = _initial(name, parameter)
        parameter.data.copy_(parameters[name])
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
    rotary = model.rotary_pos_emb
    samples = samples_of(problem)
    counted = max(sum(int(sample["counted"].sum()) for sample in samples), 1)
    total = torch.zeros((), dtype=problem.dtype)
    for sample in samples:
        plan = _plan(problem, sample)
        position = torch.from_numpy(plan.rows.position)
        model.rotary_pos_emb = _DensePositions(rotary, position)
        rows = torch.cat([sample["clean"], sample["corrupted"].flatten()])[None]
        logits = model(rows, position[None], plan)[0, problem.length :]
        loss = _plain_loss(logits, sample, rules_of(problem).objective.exclude_mask_logit)
        whole = len(samples) * max(int(sample["normalizer"]), 1)
        total = total + loss / (counted if problem.per_token else whole)
    total.backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
    }
    return Reference(float(total), grads, parameters)


def _initial(name: str, like: Tensor) -> Tensor:
    """A parameter's value, a function of its name: weights of unit gain, norms near one."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    value = torch.randn(like.shape, generator=generator, dtype=torch.float64)
    value = value * 0.1 + 1 if value.dim() == 1 else value * value.shape[-1] ** -0.5
    return value.to(like.dtype)


def _plan(problem: Problem, sample: Sample) -> RankPlan:
    rules = rules_of(problem)
    request = PlanRequest(
        length=problem.length,
        block_size=problem.block_size,
        num_views=rules.objective.num_views,
        clean_rule=rules.objective.clean_rule,
        corrupted_rule=rules.objective.corrupted_rule,
        documents=rules.documents(sample["clean"].numpy()),
    )
    return make_plan(request, 0)


def _plain_loss(logits: Tensor, sample: Sample, exclude_mask: bool) -> Tensor:
    """Sum over rows of weight * cross-entropy, written out with full logits [V * L, vocabulary]."""
    refused = torch.zeros(VOCAB, dtype=torch.bool)
    refused[VALID_VOCAB:] = True
    refused[MASK_ID] = exclude_mask
    losses = nn.functional.cross_entropy(
        logits.masked_fill(refused, float("-inf")), sample["labels"].flatten(), reduction="none"
    )
    weights = sample["weights"].flatten()
    return (losses[weights > 0] * weights[weights > 0]).sum()
