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
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from megatron_bp.attention.reference import reference_attention
from megatron_bp.data.packing import document_spans
from megatron_bp.layout.blocks import make_blocks
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from megatron_bp.mcore.core_attention import layer_window
from megatron_bp.mcore.dataset import Sample
from megatron_bp.mcore.exactness_formulas import FORMULAS, Seen, batch_loss
from megatron_bp.mcore.exactness_packed import add_parts, documents_alone
from megatron_bp.mcore.exactness_problem import (
    END_ID,
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
from megatron_bp.objectives.noise import noise_levels


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
    MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1) / problem.num_samples)
    for module in model.modules():
        if isinstance(module, TopKRouter):  # alone: other processes compute the same reference
            module.tp_dp_cp_group = module.tp_cp_group
    rotary = model.rotary_pos_emb

    def log_probabilities(problem: Problem, sample: Sample) -> Tensor:
        plan = _plan(problem, sample)
        position = torch.from_numpy(plan.rows.position)
        model.rotary_pos_emb = _DensePositions(rotary, position)
        rows = torch.cat([sample["clean"], sample["corrupted"].flatten()])[None]
        return _log_softmax(model(rows, position[None], plan)[0], problem)

    formula = FORMULAS[problem.objective].parts
    parts = []
    for index, sample in enumerate(samples_of(problem)):
        if problem.documents:
            alone = documents_alone(problem, index, sample, log_probabilities)
            parts.append(add_parts([formula(seen) for seen in alone]))
        else:
            scores = log_probabilities(problem, sample)
            parts.append(formula(see(problem, index, sample, scores)))
    total = batch_loss(parts, problem.per_token)
    # Without any target there is nothing to differentiate.
    total = total + 0 * sum(parameter.sum() for parameter in model.parameters())
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
        documents=document_spans(sample["document"].numpy(), problem.block_size),
    )
    return make_plan(request, 0)


def _log_softmax(logits: Tensor, problem: Problem) -> Tensor:
    refused = torch.zeros(VOCAB, dtype=torch.bool)
    refused[VALID_VOCAB:] = True
    refused[MASK_ID] = FORMULAS[problem.objective].never_predicts_mask
    return logits.masked_fill(refused, float("-inf")).log_softmax(-1)


def see(problem: Problem, index: int, sample: Sample, scores: Tensor) -> Seen:
    """What a formula sees of a sample with log-probabilities [(1 + V) * L, vocabulary]."""
    length, rules = problem.length, rules_of(problem)
    tokens = sample["clean"].tolist()
    supervised = [not problem.few_targets] * length
    if problem.few_targets and index == 0:
        supervised[2 * problem.block_size : 3 * problem.block_size] = [True] * problem.block_size
    document, start, block = [0], 0, [0]
    for position in range(1, length):
        new = problem.packed and tokens[position - 1] == END_ID
        start = position if new else start
        document.append(document[-1] + new)
        block.append(block[-1] + (new or (position - start) % problem.block_size == 0))
    table = make_blocks(length, problem.block_size, rules.documents(sample["clean"].numpy()))
    levels = noise_levels(table, rules.objective, seed=rules.noise_seed, sample_index=index)
    scores = scores.unflatten(0, (-1, length))
    return Seen(
        tokens=tokens,
        supervised=supervised,
        document=document,
        block=block,
        t=[float(levels[own]) for own in block],
        masked=(sample["corrupted"] == MASK_ID).tolist(),
        views=scores[1:],
        clean=scores[0],
    )
