"""Shapes of the models of the block-parallelism paper, each with where its numbers are from.

A number that no source gives is listed in `assumed` and printed with every plan. Specified by
tests/planning/test_shapes.py, which compares parameter counts with the published ones.
"""

from types import MappingProxyType

from megatron_bp.layout.model_shape import (
    AttentionShape,
    DeltaNetShape,
    ExpertsShape,
    LayerKind,
    ModelShape,
)

_NEMOTRON = "NVIDIA Nemotron-Labs-Diffusion, whose text models are Ministral 3"
_GQA = AttentionShape(num_heads=32, num_kv_heads=8, head_size=128)


def _nemotron(size: str, num_layers: int, hidden: int, ffn: int, note: str) -> ModelShape:
    return ModelShape(
        name=f"nemotron-{size}",
        hidden=hidden,
        vocab=131072,
        layers=((LayerKind(_GQA, ffn), num_layers),),
        tied=size == "3b",
        source=f"{_NEMOTRON} {size.upper()}; {note}",
    )


def _diffusion_gemma() -> ModelShape:
    experts = ExpertsShape(num_experts=128, top_k=8, ffn=704, router_scales=True)
    sliding = AttentionShape(16, 8, 256, window=1024, qk_norm=True)
    full = AttentionShape(16, 2, 512, shared_kv=True, qk_norm=True)
    return ModelShape(
        name="diffusiongemma-26b-a4b",
        hidden=2816,
        vocab=262144,
        layers=(
            (LayerKind(sliding, 2112, experts, num_norms=7), 25),
            (LayerKind(full, 2112, experts, num_norms=7), 5),
        ),
        tied=True,
        source="google/diffusiongemma-26B-A4B: 30 layers, 5 sliding to 1 full, as in the project's "
        "converter",
        assumed=("self-conditioning weights and vision tower are left out",),
    )


def _qwen() -> ModelShape:
    full = AttentionShape(24, 4, 256, output_gate=True, qk_norm=True)
    delta = DeltaNetShape(num_key_heads=16, num_value_heads=48, key_size=128, value_size=128)
    return ModelShape(
        name="qwen3.5-27b",
        hidden=5120,
        vocab=248320,
        layers=((LayerKind(delta, 17408), 48), (LayerKind(full, 17408), 16)),
        source="Qwen3.5-27B text model, 16 times (3 delta layers, 1 full); Qwen3.8-27B has the "
        "same shape",
    )


def _drafter(name: str, hidden: int, ffn: int, vocab: int, window: int) -> ModelShape:
    attention = AttentionShape(32, 8, 128, window=window, qk_norm=True)
    return ModelShape(
        name=name,
        hidden=hidden,
        vocab=vocab,
        layers=((LayerKind(attention, ffn), 5),),
        source="DFlash2 drafter of 5 layers, sizes as in its published configuration",
        assumed=(
            "embedding and head are frozen copies of the verifier's and counted as weights",
            "the feature projection, convolutions and selector are left out",
        ),
    )


MODELS = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            _nemotron(
                "3b",
                26,
                3072,
                9216,
                "feed-forward 9216 and tied embeddings: apxml.com/models/ministral-3-3b",
            ),
            _nemotron("8b", 34, 4096, 14336, "Ministral3Config defaults in transformers 5.24"),
            _nemotron("14b", 40, 5120, 16384, "untied; consistent with the published traffic"),
            _diffusion_gemma(),
            _qwen(),
            _drafter("dflash2-qwen3.8", 5120, 17408, 248320, 0),
            _drafter("dflash2-muse-glimmer", 6656, 19968, 202048, 2048),
        )
    }
)


def model_named(name: str) -> ModelShape:
    """The built-in shape called `name`.

    Raises: ValueError that lists the names.
    """
    if name not in MODELS:
        raise ValueError(
            f"model {name!r} is not built in; use one of {', '.join(MODELS)}, or give a "
            "config.json of a Hugging Face checkpoint."
        )
    return MODELS[name]
