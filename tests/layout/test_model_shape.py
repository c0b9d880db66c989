"""Parameter counts and kept bytes equal those of the models Megatron-Core builds.

Real sizes on the meta device; a small layer in fp32 with hooks on what autograd saves. Both need a
process of their own, because enabling the CPU changes torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_bp.layout.memory import kept_bytes
from megatron_bp.layout.model_shape import (
    AttentionShape,
    ExpertsShape,
    LayerKind,
    ModelShape,
    dense_model,
)
from megatron_bp.layout.run_shape import BatchShape, Policy, Recompute, Run, Topology
from tests.distributed import run_distributed

REAL = {
    "nemotron-3b": replace(
        dense_model("3b", 26, 3072, 9216, AttentionShape(32, 8, 128), 131072), tied=True
    ),
    "nemotron-14b": dense_model("14b", 40, 5120, 16384, AttentionShape(32, 8, 128), 131072),
    "qk norm": dense_model("q", 8, 2048, 6144, AttentionShape(16, 8, 128, qk_norm=True), 151936),
    "bias": dense_model("b", 4, 896, 4864, AttentionShape(14, 2, 64, bias=True), 151936),
    "experts": ModelShape(
        "moe",
        2048,
        151936,
        ((LayerKind(AttentionShape(32, 4, 128, qk_norm=True), 0, ExpertsShape(16, 8, 768)), 4),),
    ),
}
LENGTH, BLOCK = 64, 8
SMALL = dense_model("small", 1, 32, 48, AttentionShape(4, 2, 16), 64)
KEPT: dict[str, dict[str, Any]] = {
    "none": {},
    "qk norm": {"qk_layernorm": True},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


@pytest.fixture(scope="module")
def seen() -> dict[str, dict[str, int]]:
    return run_distributed(_measure, 1)[0]


@pytest.mark.parametrize("name", REAL)
def test_parameters_are_those_of_megatrons_model(
    name: str, seen: dict[str, dict[str, int]]
) -> None:
    assert REAL[name].num_parameters == seen["parameters"][name]


@pytest.mark.parametrize("name", KEPT)
def test_a_layer_keeps_what_autograd_saves(name: str, seen: dict[str, dict[str, int]]) -> None:
    attention = AttentionShape(4, 2, 16, qk_norm=name == "qk norm")
    model = dense_model("small", 1, 32, 48, attention, 64)
    recompute = Recompute(name) if name in set(Recompute) else Recompute.NONE
    policy = Policy(recompute, prune_last_layer=False, fused=False, element_bytes=4)
    run = Run(model, BatchShape(LENGTH, BLOCK), Topology(), policy)
    assert sum(kept_bytes(run, model.layers[0][0])) == seen["kept"][name]


def test_a_shared_projection_and_a_gate_change_the_count() -> None:
    plain = AttentionShape(4, 2, 16)
    weights = plain.parameters(32)
    assert replace(plain, shared_kv=True).parameters(32) == weights - 32 * 32
    assert replace(plain, output_gate=True).parameters(32) == weights + 32 * 64
    assert SMALL.num_layers == 1
    assert not SMALL.has_experts


def _measure(rank: int, num_ranks: int) -> dict[str, dict[str, int]]:
    from megatron_bp.mcore import cpu

    cpu.enable_cpu()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    kept = {}
    for name, choices in KEPT.items():
        one, two = (_saved_bytes(choices, num_layers) for num_layers in (1, 2))
        kept[name] = two - one  # what one layer adds
    return {"parameters": {name: _count(shape) for name, shape in REAL.items()}, "kept": kept}


def _config(**choices: Any) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        **choices,
    )


def _count(shape: ModelShape) -> int:
    """Parameters of the model of `shape`, built on the meta device."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    ((kind, num_layers),) = shape.layers
    mixer, experts = kind.mixer, kind.experts
    assert isinstance(mixer, AttentionShape)
    moe: dict[str, Any] = {}
    if experts.num_experts:
        moe = {
            "num_moe_experts": experts.num_experts,
            "moe_router_topk": experts.top_k,
            "moe_ffn_hidden_size": experts.ffn,
        }
    config = _config(
        num_layers=num_layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=kind.ffn or experts.ffn,
        num_attention_heads=mixer.num_heads,
        num_query_groups=mixer.num_kv_heads,
        kv_channels=mixer.head_size,
        qk_layernorm=mixer.qk_norm,
        add_qkv_bias=mixer.bias,
        init_model_with_meta_device=True,
        perform_initialization=False,
        **moe,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=experts.num_experts or None,
        qk_layernorm=mixer.qk_norm,
        normalization="RMSNorm",
    )
    with torch.device("meta"):
        model = GPTModel(
            config,
            spec,
            shape.vocab,
            4096,
            position_embedding_type="none",
            share_embeddings_and_output_weights=shape.tied,
        )
    return sum(parameter.numel() for parameter in model.parameters())


def _saved_bytes(choices: dict[str, Any], num_layers: int) -> int:
    """Bytes of the storages that a forward pass leaves for backward, weights left out."""
    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_bp.attention.block_parallel import AttentionOptions
    from megatron_bp.comm.groups import BlockGroups
    from megatron_bp.layout.plan import PlanRequest
    from megatron_bp.mcore.carrier import make_layout, make_params
    from megatron_bp.mcore.model import diffusion_spec, use_plan_positions

    config = _config(
        num_layers=num_layers,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        use_cpu_initialization=True,
        **choices,
    )
    qk_norm = choices.get("qk_layernorm", False)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_norm)
    model = GPTModel(
        config, diffusion_spec(spec, config), 64, LENGTH, position_embedding_type="rope"
    )
    (model,) = use_plan_positions([model])
    model.train()
    layout = make_layout(
        PlanRequest(LENGTH, BLOCK),
        BlockGroups.single(),
        AttentionOptions(softmax_scale=1.0),
        False,
        torch.device("cpu"),
    )
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, tuple[int, Any]] = {}

    def note(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes(), tensor  # held, so no address comes twice
        return tensor

    ids = torch.arange(2 * LENGTH)[None] % 64
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        model(
            ids,
            layout.position[None],
            None,
            packed_seq_params=make_params(layout),
            output_processor=lambda *, hidden_states, **_: hidden_states.sum(),
        )
    return sum(size for size, _ in saved.values())
