"""The tiny problems and layouts of the exactness check: data, model shape and process groups.

Used by exactness.py (any layout) and exactness_reference.py (one process). Specified by
tests/tools/test_check_exact.py.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_bp.data.packing import document_of_position
from megatron_bp.mcore.dataset import CorruptionRules, Sample
from megatron_bp.mcore.exactness_formulas import FORMULAS
from megatron_bp.objectives.objective import make_objective

VOCAB, VALID_VOCAB, MASK_ID, END_ID = 64, 61, 60, 0


class FullPrecisionSoftmax:
    """Lets an fp64 problem's softmax be fp64 where Megatron's router asks for fp32.

    In fp32 the gradient of a replicated clean row is rounded rank by rank, which hides errors
    below 1e-8. Both sides of a comparison run under it. It replaces the function, because a torch
    function mode does not reach layers that run again in backward.
    """

    def __enter__(self) -> None:
        self._stock = stock = torch.softmax

        def softmax(scores: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if scores.dtype == torch.float64:
                kwargs = {**kwargs, "dtype": torch.float64}
            return stock(scores, *args, **kwargs)

        torch.softmax = softmax  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        torch.softmax = self._stock


@dataclass(frozen=True)
class Problem:
    """What is trained: the part of a case that does not depend on the layout.

    `objective` is a name in `FORMULAS`. Units: `length`, `block_size`, `window` in tokens.
    `packed` splits a random stream at its end tokens; `documents` are lengths of whole documents,
    each with an unsupervised prompt, that are packed and padded (`packed` is then set too).
    `few_targets` supervises the third block of the first sample only, so that most ranks have no
    target at all. (Were the first one wholly masked, query gradients would be rounding alone.)
    """

    objective: str = "standard"
    clean_rule: str = "token_causal"
    window: int = 0
    length: int = 64
    block_size: int = 4
    num_samples: int = 2
    packed: bool = False
    documents: tuple[int, ...] = ()
    length_multiple: int = 0
    few_targets: bool = False
    num_experts: int = 0
    balance: str = "aux_loss"
    z_loss: float = 0.0
    expert_bias: bool = False
    num_layers: int = 2
    per_token: bool = False
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Layout:
    """How it is split: `context` and `block` are the two flags of a launch.

    `virtual` is the number of model chunks of a pipeline rank; `expert` ranks deal the experts, out
    of the context and data ranks. `overlap`: the distributed optimizer's buffers, with gradients
    reduced during backward and parameters gathered during forward. `knobs` are further flags, by
    name in BlockParallelConfig.
    """

    context: int = 1
    block: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    virtual: int = 1
    expert: int = 1
    overlap: bool = False
    sequence_parallel: bool = False
    recompute: str = "none"
    recompute_attention: str = "rerun"
    clean_kv: str = "keep"
    strategy: str = "native"
    knobs: tuple[tuple[str, Any], ...] = ()

    @property
    def num_ranks(self) -> int:
        """P, the ranks that share one sample."""
        return max(self.context, self.block)

    @property
    def expert_tensor(self) -> int:
        """Tensor-parallel ranks of an expert: whole experts, if they are dealt.

        Halves of dealt experts would need gloo to gather tensors of unequal sizes, which it cannot.
        """
        return self.tensor if self.expert == 1 else 1

    @property
    def degrees(self) -> tuple[int, ...]:
        """What decides the process groups."""
        axes = (self.context, self.block, self.tensor, self.pipeline, self.data)
        return *axes, self.virtual, self.expert

    @property
    def world_size(self) -> int:
        """Processes the layout needs."""
        return self.tensor * self.pipeline * self.num_ranks * self.data


def rules_of(problem: Problem) -> CorruptionRules:
    """The corruption rules of a problem."""
    formula = FORMULAS[problem.objective]
    scope = "global" if problem.per_token else "example"
    choices = {"clean_rule": problem.clean_rule, **dict(formula.choices), "scope": scope}
    return CorruptionRules(
        objective=make_objective(formula.preset, **choices),
        block_size=problem.block_size,
        mask_token_id=MASK_ID,
        noise_seed=17,
        end_of_document=END_ID,
        split_documents=problem.packed,
        end_is_target=True,
        vocab_size=VALID_VOCAB,
    )


@lru_cache(maxsize=8)
def samples_of(problem: Problem) -> tuple[Sample, ...]:
    """Random samples; packed ones have documents down to one token."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for index in range(problem.num_samples):
        if problem.documents:
            clean = clean_packed(problem, index)
            made.append(rules_of(problem).sample(clean, index, is_padding=False))
            continue
        tokens = torch.randint(1, MASK_ID, (problem.length,), generator=generator)
        if problem.packed:
            tokens[[2, 3, 3 + problem.block_size, problem.length - 7 - 5 * index]] = END_ID
        loss_mask = torch.ones(problem.length)
        if problem.few_targets:
            loss_mask.zero_()
            if index == 0:
                # One block is supervised: megatron's mask at i is about token i + 1. Four counted
                # tokens also keep Megatron's fp32 division by the count exact.
                loss_mask[2 * problem.block_size - 1 : 3 * problem.block_size - 1] = 1
        clean = {"tokens": tokens, "loss_mask": loss_mask}
        made.append(rules_of(problem).sample(clean, index, is_padding=False))
    return tuple(made)


def clean_packed(problem: Problem, index: int) -> Sample:
    """A sample of `problem.documents`; the first third of each is a prompt, the rest is learnt."""
    generator = torch.Generator().manual_seed(100 + index)
    tokens = torch.randint(1, MASK_ID, (problem.length,), generator=generator)
    document = torch.from_numpy(document_of_position(problem.documents, problem.length))
    supervised = torch.cat(
        [torch.arange(length) >= length // 3 for length in problem.documents]
        + [torch.zeros(problem.length - sum(problem.documents), dtype=torch.bool)]
    )
    return {"tokens": tokens, "supervised": supervised, "document": document}


def transformer_config(problem: Problem, layout: Layout) -> TransformerConfig:
    """A GQA, QK-norm, RMSNorm, SwiGLU transformer as Qwen3's; every other layer has the window.

    With experts as Qwen3-MoE's: softmax over the chosen ones, an auxiliary loss for balance.
    """
    return TransformerConfig(
        num_layers=problem.num_layers,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=48,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=problem.dtype,
        pipeline_dtype=problem.dtype,
        window_size=(problem.window - 1, 0) if problem.window else None,
        window_attn_skip_freq=[1, 0] * (problem.num_layers // 2) if problem.window else None,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        context_parallel_size=layout.num_ranks,
        sequence_parallel=layout.sequence_parallel,
        variable_seq_lengths=layout.pipeline > 1,
        # As Megatron's arguments have it: batched messages of two stages of chunks get mixed up.
        overlap_p2p_comm=layout.virtual > 1,
        batch_p2p_comm=layout.virtual == 1,
        calculate_per_token_loss=problem.per_token,
        # Megatron rejects its default dispatcher with variable lengths, even for dense models.
        moe_token_dispatcher_type="alltoall",
        **_recompute(layout),
        **_experts(problem, layout),
    )


def _recompute(layout: Layout) -> dict[str, Any]:
    if layout.recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    if layout.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _experts(problem: Problem, layout: Layout) -> dict[str, Any]:
    if not problem.num_experts:
        return {}
    return {
        "num_moe_experts": problem.num_experts,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.1,
        "moe_router_load_balancing_type": problem.balance,
        "moe_ffn_hidden_size": 24,
        "moe_z_loss_coeff": problem.z_loss or None,
        "moe_router_enable_expert_bias": problem.expert_bias,
        "moe_router_score_function": "sigmoid" if problem.expert_bias else "softmax",
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
    }


def start_layout(layout: Layout) -> None:
    """Makes Megatron's process groups for a layout; collective over all processes."""
    parallel_state.destroy_model_parallel()
    ranks = layout.num_ranks
    shards = layout.context
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual if layout.virtual > 1 else None,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        context_parallel_size=ranks,
        hierarchical_context_parallel_sizes=[shards, ranks // shards] if ranks > 1 else None,
    )
    model_parallel_cuda_manual_seed(1)


def local_spec(problem: Problem) -> Any:
    """The stock layer specification without Transformer Engine."""
    return get_gpt_layer_local_spec(
        num_experts=problem.num_experts or None, qk_layernorm=True, normalization="RMSNorm"
    )


def gpt(config: TransformerConfig, spec: Any, problem: Problem, chunk: int = 0) -> GPTModel:
    """A GPTModel of this pipeline stage, or of one of its chunks."""
    stage = chunk if config.virtual_pipeline_model_parallel_size else None
    return GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=problem.length,
        position_embedding_type="rope",
        rotary_base=1000,
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(stage is None, stage),
        post_process=parallel_state.is_pipeline_last_stage(stage is None, stage),
        vp_stage=stage,
    )
