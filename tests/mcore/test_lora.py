"""Adapters train as explicit dense weights W + scale * B @ A would, in every layout."""

from __future__ import annotations

import argparse
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed

TOLERANCE = 1e-10  # of each gradient's largest value: the sums run in other orders in fp64
RANK, ALPHA = 3, 5.0

Answer = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def seen() -> Answer:
    layouts = {
        "tp1": {"data": 2},
        "tp2": {"tensor": 2},
        "tp2 sp": {"tensor": 2, "sequence_parallel": True},
        "csbp2": {"context": 2, "block": 2},
        "recompute": {"context": 2, "block": 2, "recompute": "full"},
    }
    return run_distributed(_layouts, 2, layouts)[0]


def assert_exact(answer: dict[str, Any]) -> None:
    """Loss and every adapter's gradient equal the dense model's; nothing else has one."""
    assert answer["loss error"] <= TOLERANCE
    assert answer["gradient error"] <= TOLERANCE, answer["worst"]
    assert answer["trained"] == 2 * 4 * 2  # layers, linear layers, factors
    assert answer["frozen with a gradient"] == []
    assert answer["in buffers"] == answer["in adapters"]


@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2 sp", "csbp2", "recompute"])
def test_adapters_equal_dense_weights(seen: Answer, layout: str) -> None:
    assert_exact(seen[layout])


def test_every_layout_draws_the_same_adapters(seen: Answer) -> None:
    """A is uniform and not constant, B is zero; two ranks hold what one rank holds."""
    for name, value in seen["tp1"]["drawn"].items():
        if name.endswith("lora_b"):
            assert not value.any()
            continue
        assert 0.5 < value.abs().max() * value.size(1) ** 0.5 <= 1
        assert torch.equal(seen["csbp2"]["drawn"][name], value)
        split = name.endswith(("linear_proj.lora_a", "linear_fc2.lora_a"))
        mine = value.chunk(2, 1)[0] if split else value
        assert torch.equal(seen["tp2 sp"]["drawn"][name], mine)


def test_other_linear_layers_are_refused() -> None:
    from megatron_bp.mcore.lora import Lora, adapted_spec

    inner = SimpleNamespace(linear_qkv=torch.nn.Linear, linear_proj=torch.nn.Linear)
    outer = SimpleNamespace(linear_fc1=torch.nn.Linear, linear_fc2=torch.nn.Linear)
    spec = SimpleNamespace(
        submodules=SimpleNamespace(
            self_attention=SimpleNamespace(submodules=inner),
            mlp=SimpleNamespace(keywords={"submodules": outer}),
        )
    )
    with pytest.raises(TypeError, match=r"specification has .*Linear.*; use --transformer-impl"):
        adapted_spec(spec, Lora(2, 4.0, 1))


def _layouts(rank: int, num_ranks: int, layouts: dict[str, dict[str, Any]]) -> Answer:
    from megatron_bp.mcore import cpu

    cpu.enable_cpu()
    torch.set_default_dtype(torch.float64)
    from megatron.training.global_vars import _set_timers

    from megatron_bp.mcore.exactness_problem import Layout, Problem, start_layout
    from megatron_bp.mcore.exactness_reference import compute_reference

    _set_timers(argparse.Namespace(timing_log_level=0, timing_log_option="minmax"))
    start_layout(Layout(data=num_ranks))
    dense = _with_adapters(compute_reference(Problem()))
    answers = {}
    for name, degrees in layouts.items():
        layout = Layout(**degrees)
        start_layout(layout)
        answers[name] = _train(Problem(), layout, dense)
    return answers


def _with_adapters(dense: Any) -> Any:
    """The same function of other parameters: every dense weight as W + scale * B @ A."""
    from megatron_bp.mcore.exactness_reference import Reference

    parameters, grads = dict(dense.parameters), dict(dense.grads)
    for name, weight in dense.parameters.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or ".linear_" not in name:
            continue
        a = _random(f"{module}.lora_a", RANK, weight.size(1)).requires_grad_()
        b = _random(f"{module}.lora_b", weight.size(0), RANK).requires_grad_()
        product = ALPHA / RANK * b @ a
        product.backward(dense.grads[name])
        parameters[name] = weight - product.detach()
        for factor, value in (("lora_a", a), ("lora_b", b)):
            parameters[f"{module}.{factor}"] = value.detach()
            grads[f"{module}.{factor}"] = value.grad
    return Reference(dense.loss, grads, parameters)


def _random(name: str, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.3


def _train(problem: Any, layout: Any, reference: Any) -> dict[str, Any]:
    from megatron_bp.mcore import exactness
    from megatron_bp.mcore.exactness_problem import gpt, local_spec
    from megatron_bp.mcore.lora import Lora, adapted_spec, is_adapter
    from megatron_bp.mcore.lora_state import draw_adapters, freeze_base
    from megatron_bp.mcore.model import diffusion_spec, use_plan_positions

    models, drawn, wrapped = [], {}, []

    def adapted(problem: Any, layout: Any, config: Any) -> list[Any]:
        spec = diffusion_spec(local_spec(problem), config)
        model = gpt(config, adapted_spec(spec, Lora(RANK, ALPHA, 7)), problem)
        use_plan_positions([model])
        freeze_base(model)
        draw_adapters(model)
        drawn.update((name, p.clone()) for name, p in model.named_parameters() if is_adapter(name))
        models.append(model)
        return models

    def distributed(*args: Any) -> list[Any]:
        wrapped.extend(stock[1](*args))
        return wrapped

    stock = exactness._chunks, exactness.distribute
    exactness._chunks, exactness.distribute = adapted, distributed
    result = exactness.check(problem, layout, reference)
    exactness._chunks, exactness.distribute = stock
    (model,) = models
    adapters = [p for name, p in model.named_parameters() if is_adapter(name)]
    frozen = [name for name, p in model.named_parameters() if not is_adapter(name)]
    named = dict(model.named_parameters())
    return {
        "loss error": result.loss_error,
        "gradient error": result.grad_error,
        "worst": result.worst_parameter,
        "trained": sum(hasattr(p, "main_grad") for p in adapters),
        "frozen with a gradient": [
            name
            for name in frozen
            if named[name].grad is not None or hasattr(named[name], "main_grad")
        ],
        "in buffers": sum(p.numel() for buffer in wrapped[0].buffers for p in buffer.params),
        "in adapters": sum(p.numel() for p in adapters),
        "drawn": {name: value.detach() for name, value in drawn.items()},
    }
