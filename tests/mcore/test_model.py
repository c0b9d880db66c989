"""The model is Megatron's: same parameters and keys; a pruned last layer changes no result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed

LENGTH, BLOCK, VOCABULARY = 24, 4, 64


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return run_distributed(_models, 1)[0]


def test_checkpoint_keys_are_those_of_the_stock_model(seen: dict[str, Any]) -> None:
    assert seen["our keys"] == seen["stock keys"]


def test_a_batch_without_our_carrier_takes_the_stock_path(seen: dict[str, Any]) -> None:
    assert torch.equal(seen["our plain logits"], seen["stock plain logits"])


def test_pruning_drops_clean_rows_and_changes_no_gradient(seen: dict[str, Any]) -> None:
    whole, pruned = seen["whole"], seen["pruned"]
    assert whole["rows"] == 2 * LENGTH
    assert pruned["rows"] == LENGTH
    assert torch.allclose(whole["loss"], pruned["loss"], rtol=1e-12, atol=0)
    assert whole["gradients"].keys() == pruned["gradients"].keys()
    for name, gradient in whole["gradients"].items():
        scale = gradient.abs().max()
        assert (gradient - pruned["gradients"][name]).abs().max() <= 1e-12 * scale, name


def test_an_unknown_layer_class_is_refused() -> None:
    from megatron_bp.mcore.model import diffusion_spec

    with pytest.raises(TypeError, match="fit TransformerLayer only; use a stock GPT specification"):
        diffusion_spec(SimpleNamespace(module=torch.nn.Linear, submodules=None), None)


def test_a_model_with_stock_attention_is_refused() -> None:
    from megatron_bp.mcore.model import require_seats

    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    model.layer.core_attention = torch.nn.Identity()
    with pytest.raises(RuntimeError, match=r"layer\.core_attention is Identity, which"):
        require_seats([model])


def _models(rank: int, num_ranks: int) -> dict[str, Any]:
    from megatron_bp.mcore import cpu

    cpu.enable_cpu()
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_bp.mcore.model import diffusion_spec, use_plan_positions

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    stock = _model(lambda config: get_gpt_layer_local_spec(normalization="RMSNorm"))
    ours = _model(
        lambda config: diffusion_spec(get_gpt_layer_local_spec(normalization="RMSNorm"), config)
    )
    ours.load_state_dict(stock.state_dict())
    (ours,) = use_plan_positions([ours])
    ids = torch.arange(LENGTH)[None] % VOCABULARY
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    answers: dict[str, Any] = {
        "stock keys": list(stock.sharded_state_dict()),
        "our keys": list(ours.sharded_state_dict()),
        "stock plain logits": stock(ids, ids, hidden).detach(),
        "our plain logits": ours(ids, ids, hidden).detach(),
    }
    for name, prune in (("whole", False), ("pruned", True)):
        answers[name] = _step(ours, prune)
    return answers


def _model(spec: Any) -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=24,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
    )
    model = GPTModel(config, spec(config), VOCABULARY, LENGTH, position_embedding_type="rope")
    return model.double()


def _step(model: Any, prune: bool) -> dict[str, Any]:
    from dataclasses import replace

    from megatron_bp.mcore.carrier import make_params
    from tests.mcore.test_batch import layout

    mine = replace(layout(0, 1, 1), prune=prune)
    ids = (torch.arange(2 * LENGTH)[None] * 7) % VOCABULARY
    rows = []

    def loss_of_corrupted_rows(*, hidden_states: Any, **_: Any) -> Any:
        rows.append(hidden_states.size(0))
        return hidden_states[-LENGTH:].square().sum(-1).log().sum()

    model.zero_grad()
    loss = model(
        ids,
        mine.position[None],
        None,
        packed_seq_params=make_params(mine),
        output_processor=loss_of_corrupted_rows,
    )
    loss.backward()
    gradients = {
        name: value.grad.clone()
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    return {"loss": loss.detach(), "rows": rows[0], "gradients": gradients}
