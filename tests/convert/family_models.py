"""Tiny models of every family that transformers has a class for. Sizes differ from one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

DENSE = {
    "num_hidden_layers": 2,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GDN = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
GEMMA = {
    **DENSE,
    "num_hidden_layers": 3,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
GEMMA_MOE = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 20}
NO_PER_LAYER_INPUT = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
GEMMA_VISION = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 8,
    "pooling_kernel_size": 1,
    "use_clipped_linears": True,
}


def _qwen2(tied: bool) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**DENSE, tie_word_embeddings=tied))


def _qwen3(tied: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**DENSE, head_dim=16, tie_word_embeddings=tied))


def _llama(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**DENSE, tie_word_embeddings=tied))


def _qwen3_moe(tied: bool) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**DENSE, **MOE, head_dim=16, tie_word_embeddings=tied)
    config.norm_topk_prob = True
    return Qwen3MoeForCausalLM(config)


def _ministral3(tied: bool) -> Any:
    from transformers import Ministral3Config, Ministral3ForCausalLM

    return Ministral3ForCausalLM(
        Ministral3Config(**DENSE, head_dim=16, rope_parameters=YARN, tie_word_embeddings=tied)
    )


def _mistral3(tied: bool) -> Any:
    from transformers import Ministral3Config, Mistral3Config, Mistral3ForConditionalGeneration

    text = Ministral3Config(**DENSE, head_dim=16, rope_parameters=YARN, tie_word_embeddings=tied)
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text.to_dict(), vision_config=PIXTRAL, tie_word_embeddings=tied)
    )


def _qwen3_5_text(tied: bool) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**DENSE, **GDN}, tie_word_embeddings=tied))


def _qwen3_5(tied: bool) -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

    text = Qwen3_5TextConfig(**{**DENSE, **GDN}, tie_word_embeddings=tied)
    return Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(
            text_config=text.to_dict(), vision_config=QWEN_VISION, tie_word_embeddings=tied
        )
    )


def _qwen3_5_moe(tied: bool) -> Any:
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    sizes = {k: v for k, v in {**DENSE, **GDN, **MOE}.items() if k != "intermediate_size"}
    return Qwen3_5MoeForCausalLM(
        Qwen3_5MoeTextConfig(**sizes, shared_expert_intermediate_size=28, tie_word_embeddings=tied)
    )


def _gemma4_text(tied: bool) -> Any:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(
        **GEMMA,
        **GEMMA_MOE,
        **NO_PER_LAYER_INPUT,
        attention_k_eq_v=True,
        enable_moe_block=True,
        tie_word_embeddings=tied,
    )
    return Gemma4ForCausalLM(config)


def _gemma4_with_v(tied: bool) -> Any:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(**GEMMA, **NO_PER_LAYER_INPUT, tie_word_embeddings=tied)
    return Gemma4ForCausalLM(config)


def _gemma4(tied: bool) -> Any:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig

    text = Gemma4TextConfig(
        **GEMMA, **NO_PER_LAYER_INPUT, attention_k_eq_v=True, tie_word_embeddings=tied
    )
    return Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config=text.to_dict(),
            vision_config={**GEMMA_VISION, "use_clipped_linears": False},
            audio_config=None,
            tie_word_embeddings=tied,
        )
    )


def _gemma4_moe(tied: bool) -> Any:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig

    text = Gemma4TextConfig(
        **GEMMA,
        **GEMMA_MOE,
        **NO_PER_LAYER_INPUT,
        attention_k_eq_v=True,
        enable_moe_block=True,
        final_logit_softcapping=30.0,
        use_bidirectional_attention="vision",
        tie_word_embeddings=tied,
    )
    return Gemma4ForConditionalGeneration(
        Gemma4Config(
            text_config=text.to_dict(),
            vision_config=GEMMA_VISION,
            audio_config=None,
            tie_word_embeddings=tied,
        )
    )


def _diffusion_gemma(tied: bool) -> Any:
    from transformers import (
        DiffusionGemmaConfig,
        DiffusionGemmaForBlockDiffusion,
        DiffusionGemmaTextConfig,
    )

    assert tied, "DiffusionGemma is always tied"
    text = DiffusionGemmaTextConfig(**GEMMA, **GEMMA_MOE)
    return DiffusionGemmaForBlockDiffusion(
        DiffusionGemmaConfig(
            text_config=text.to_dict(), vision_config=GEMMA_VISION, canvas_length=8
        )
    )


BUILDERS: dict[str, Callable[[bool], Any]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "ministral3": _ministral3,
    "mistral3": _mistral3,
    "qwen3_5_text": _qwen3_5_text,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "gemma4_text": _gemma4_text,
    "gemma4_with_v": _gemma4_with_v,
    "gemma4": _gemma4,
    "gemma4_moe": _gemma4_moe,
    "diffusion_gemma": _diffusion_gemma,
}
