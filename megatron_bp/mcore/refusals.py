"""Finds everything in a run's arguments that block diffusion cannot meet, before anything is built.

Each problem is one sentence with the flags concerned and a value that would work; all are reported
in one error. Knows arguments, the tokenizer's ids and the arguments saved in a checkpoint, but no
model and no process group. Specified by tests/mcore/test_refusals.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_bp.config import BLOCK_PARALLEL, BlockParallelConfig, flag, list_problems
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.mcore.checkpoints import TRACKER, checkpoint_problems, is_same_folder
from megatron_bp.mcore.choices import objective_of
from megatron_bp.mcore.expert_refusals import expert_problems
from megatron_bp.mcore.lora_flags import lora_problems

# What decides the meaning of the weights; a resumed run must not change it unnoticed.
KEPT_ON_RESUME = (
    "bdlm_objective",
    "block_size",
    "mask_token_id",
    "clean_rule",
    "bdlm_canvas",
    "bdlm_lora_rank",
    "bdlm_lora_alpha",
)

Problems = list[str]


def refuse(args: argparse.Namespace, config: BlockParallelConfig) -> None:
    """Returns if the arguments (as parsed, before Megatron validates them) can be met.

    Raises: ValueError that lists every problem.
    """
    checks: tuple[Callable[[argparse.Namespace, BlockParallelConfig], Problems], ...] = (
        objective_problems,
        degree_problems,
        node_problems,
        length_problems,
        model_problems,
        expert_problems,
        recompute_problems,
        unverified_problems,
        data_problems,
        load_problems,
        checkpoint_problems,
        lora_problems,
    )
    problems = [problem for check in checks for problem in check(args, config)]
    if problems:
        raise ValueError(list_problems(problems))


def objective_problems(args: argparse.Namespace, config: BlockParallelConfig) -> Problems:
    """Returns which choices of the objective do not fit together."""
    try:
        objective_of(args, config)
    except ValueError as error:
        return [f"--bdlm-objective {config.bdlm_objective} cannot be trained as asked: {error}"]
    return []


def degree_problems(args: argparse.Namespace, config: BlockParallelConfig) -> Problems:
    """Returns what is wrong with the parallel degrees."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp, bp = args.context_parallel_size, config.block_parallel_size
    problems = []
    if bp != 1 and bp % cp:
        problems.append(
            f"--block-parallel-size {bp} is not a multiple of --context-parallel-size {cp}; use "
            f"--block-parallel-size {-(-bp // cp) * cp}, or 1 for conventional context parallelism"
        )
    context = max(cp, bp)
    if args.world_size % (tp * pp * context):
        problems.append(
            f"{args.world_size} processes are not a multiple of TP {tp} x PP {pp} x context group "
            f"{context} (= max(--context-parallel-size, --block-parallel-size)); start "
            f"{-(-args.world_size // (tp * pp * context)) * tp * pp * context} processes"
        )
    heads, groups = args.num_attention_heads, args.num_query_groups
    if heads and heads % tp:
        problems.append(
            f"--num-attention-heads {heads} is not a multiple of --tensor-model-parallel-size "
            f"{tp}; use "
            f"--tensor-model-parallel-size {_largest_divisor(heads, tp)}"
        )
    elif heads and args.group_query_attention and groups % tp and tp % groups:
        problems.append(
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tp} do not divide one "
            f"another; use --tensor-model-parallel-size {_largest_divisor(groups, tp)}"
        )
    return problems


def node_problems(args: argparse.Namespace, config: BlockParallelConfig) -> Problems:
    """Returns why the ranks that share clean rows do not fill nodes, if so."""
    node, tp = config.bp_hierarchical_gather, args.tensor_model_parallel_size
    shards, per_node = args.context_parallel_size, max(1, node // tp)
    if node <= 0 or (node % tp == 0 and (shards % per_node == 0 or per_node % shards == 0)):
        return []
    return [
        f"--bp-hierarchical-gather {node} is a node that {shards} clean shards of TP {tp} ranks do "
        f"not fill; use --bp-hierarchical-gather {tp * _largest_divisor(shards, per_node)}, or 0"
    ]


def length_problems(args: argparse.Namespace, config: BlockParallelConfig) -> Problems:
    """Returns why no layout exists for this sequence length, if so."""
    if args.seq_length is None:
        return ["--seq-length is missing; it is the clean length L of a sample, for example 4096"]
    cp, bp = args.context_parallel_size, config.block_parallel_size
    if bp != 1 and bp % cp:
        return []  # reported by degree_problems
    try:
        make_plan(PlanRequest(args.seq_length, config.block_size, max(cp, bp), cp), 0)
    except ValueError as error:
        return [f"--seq-length {args.seq_length} cannot be laid out: {error}"]
    return []


def model_problems(args: argparse.Namespace, config: BlockParallelConfig) -> Problems:
    """Returns what of the model block-diffusion attention does not have."""
    problems = []
    if args.attention_dropout:
        problems.append(
            f"--attention-dropout {args.attention_dropout} is not supported: every kernel would "
            "need "
            "the same random mask on every layout; use --attention-dropout 0"
        )
    if args.hidden_dropout:
        problems.append(
            f"--hidden-dropout {args.hidden_dropout} would be drawn for each rank's own rows, so "
            "the "
            "result would depend on the layout; use --hidden-dropout 0"
        )
    window = args.window_size
    if window and (len(window) != 2 or window[1] != 0):
        problems.append(
            f"--window-size {window} looks ahead; a window is (W-1, 0) with W keys, so use for "
            "example "
            "--window-size 1023,0"
        )
    if args.position_embedding_type not in ("rope", "yarn", "learned_absolute", "none"):
        problems.append(
            f"--position-embedding-type {args.position_embedding_type} is not supported; use rope"
        )
    if args.rotary_seq_len_interpolation_factor not in (None, 1):
        problems.append(
            "--rotary-seq-len-interpolation-factor is not supported; use --position-embedding-type "
            "yarn"
        )
    if getattr(args, "softmax_type", "vanilla") != "vanilla":
        problems.append(f"--softmax-type {args.softmax_type} is not supported; use vanilla")
    return problems


def recompute_problems(args: argparse.Namespace, config: BlockParallelConfig) -> Problems:
    """Returns which wishes about layers that run twice cannot be met."""
    problems, full = [], args.recompute_granularity == "full"
    if config.bp_recompute_attention == "keep" and not full:
        problems.append(
            "--bp-recompute-attention keep needs layers that run twice; add "
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1, or "
            "use --bp-recompute-attention auto"
        )
    if full and config.bp_recompute_attention == "rerun" and config.bp_clean_kv == "keep":
        problems.append(
            "--bp-clean-kv keep has no effect with --bp-recompute-attention rerun, whose second "
            "run gathers again; use --bp-clean-kv auto"
        )
    return problems


# (attribute, value that is fine, what to do); everything that is refused only because it is on.
_MUST_BE_OFF: tuple[tuple[str, Any, str], ...] = (
    (
        "hybrid_context_parallel",
        False,
        "drop --hybrid-context-parallel (dynamic context parallelism)",
    ),
    (
        "max_seqlen_per_dp_cp_rank",
        None,
        "drop --max-seqlen-per-dp-cp-rank (dynamic context parallelism)",
    ),
    (
        "hierarchical_context_parallel_sizes",
        None,
        "drop --hierarchical-context-parallel-sizes; block parallelism sets it to [C, P / C]",
    ),
    ("mtp_num_layers", None, "drop --mtp-num-layers (multi-token prediction)"),
    ("fused_single_qkv_rope", False, "drop --fused-single-qkv-rope"),
    ("cuda_graph_impl", "none", "use --cuda-graph-impl none"),
    ("enable_cuda_graph", False, "drop --enable-cuda-graph"),
    ("external_cuda_graph", False, "drop --external-cuda-graph"),
    (
        "tp_comm_overlap",
        False,
        "drop --tp-comm-overlap; its buffers are sized for seq_length / CP rows",
    ),
    ("multi_latent_attention", False, "drop --multi-latent-attention"),
    ("experimental_attention_variant", None, "drop --experimental-attention-variant"),
    ("heterogeneous_layers_config_path", None, "drop --heterogeneous-layers-config-path"),
    ("hybrid_layer_pattern", None, "drop --hybrid-layer-pattern; use a GPT model"),
    ("use_megatron_fsdp", False, "drop --use-megatron-fsdp; use --use-distributed-optimizer"),
    ("use_torch_fsdp2", False, "drop --use-torch-fsdp2; use --use-distributed-optimizer"),
    ("overlap_moe_expert_parallel_comm", False, "drop --overlap-moe-expert-parallel-comm"),
    ("qk_clip", False, "drop --qk-clip; it reads the largest attention logit"),
    ("log_max_attention_logit", False, "drop --log-max-attention-logit"),
    ("perform_rl_step", False, "drop --perform-rl-step"),
    ("yaml_cfg", None, "give the arguments as flags instead of --yaml-cfg"),
    ("tensor_parallel_num_weight_shards", None, "drop --tensor-parallel-num-weight-shards"),
    (
        "fine_grained_activation_offloading",
        False,
        "drop --fine-grained-activation-offloading, which empties tensors that the backward of our "
        "attention reads; use --recompute-granularity full",
    ),
    (
        "cpu_offloading_num_layers",
        0,
        "drop --cpu-offloading-num-layers (not verified); use --recompute-granularity full",
    ),
    ("fp4", None, "drop --fp4-format; attention computes in bf16 and fp4 linears are not verified"),
)
OUR_SPEC = ("megatron_bp.mcore.spec", "gpt_layer")


def unverified_problems(args: argparse.Namespace, config: BlockParallelConfig) -> Problems:
    """Returns which features are on that block diffusion does not support or has not verified."""
    problems = [
        f"{flag(name)} {getattr(args, name)} is not supported with --bdlm-objective; {remedy}"
        for name, fine, remedy in _MUST_BE_OFF
        if getattr(args, name, fine) not in (fine, None)
    ]
    named = BLOCK_PARALLEL in args.cp_comm_type
    if named and len(args.cp_comm_type) > 1:
        problems.append(
            f"--cp-comm-type {' '.join(args.cp_comm_type)} mixes block parallelism with other ways;"
            f" use --cp-comm-type {BLOCK_PARALLEL} for all layers, or drop it"
        )
    if named and config.bp_prune_last_layer:
        problems.append(
            f"--cp-comm-type {BLOCK_PARALLEL} keeps your layer specification, whose last layer "
            "cannot drop rows; add --no-bp-prune-last-layer"
        )
    if args.spec is not None and tuple(args.spec) != OUR_SPEC and not named:
        problems.append(
            f"--spec {' '.join(args.spec)} is not supported with --bdlm-objective; drop --spec, or "
            f"use --spec {' '.join(OUR_SPEC)}"
        )
    if getattr(args.attention_backend, "name", args.attention_backend) == "local":
        problems.append(
            "--attention-backend local makes Megatron replace the attention of the layer "
            "specification; use --attention-backend auto with --transformer-impl local"
        )
    return problems


def data_problems(args: argparse.Namespace, config: BlockParallelConfig) -> Problems:
    """Returns which data modes cannot be used."""
    problems = []
    if args.sft:
        problems.append(
            "--sft packs variable-length samples (thd); use --bdlm-data sft instead of --sft"
        )
    if args.dataloader_inter_document_masking:
        problems.append(
            "--dataloader-inter-document-masking packs documents as thd; use --reset-attention-mask"
        )
    if args.reset_position_ids:
        problems.append(
            "--reset-position-ids is not supported: say it with --document-positions restart (the "
            "default) or run_on"
        )
    if args.reset_attention_mask and args.micro_batch_size != 1:
        problems.append(
            "--reset-attention-mask and --bdlm-data sft need one layout for each sample, so "
            f"--micro-batch-size {args.micro_batch_size} cannot be used; use --micro-batch-size 1"
        )
    if args.dataloader_type == "external":
        problems.append("--dataloader-type external is not supported; use single or cyclic")
    return problems


def load_problems(args: argparse.Namespace, config: BlockParallelConfig) -> Problems:
    """Returns which checkpoint folders hold no checkpoint.

    Megatron starts from random weights when it finds none, with one line in the log. Only a run
    that loads from where it saves may start without one: its first start.
    """
    folders = {"load": args.load, "pretrained_checkpoint": args.pretrained_checkpoint}
    return [
        f"{flag(name)} {folder} holds no checkpoint (no {TRACKER}); correct the path, or drop the "
        "flag "
        "to start from random weights"
        for name, folder in folders.items()
        if folder is not None
        and not (Path(folder) / TRACKER).is_file()
        and not (name == "load" and args.save is not None and is_same_folder(folder, args.save))
    ]


def vocabulary_problems(
    mask_token_id: int, vocab_size: int, special_ids: Mapping[str, int]
) -> Problems:
    """Returns why the mask token id cannot be one, if so; `vocab_size` is without padding."""
    if not 0 <= mask_token_id < vocab_size:
        return [
            f"--mask-token-id {mask_token_id} is outside the vocabulary [0, {vocab_size}); add a "
            "mask "
            "token to the tokenizer and its row to the checkpoint (tools/convert_checkpoint.py "
            "does "
            f"both), or use an unused id below {vocab_size}"
        ]
    names = [name for name, value in special_ids.items() if value == mask_token_id]
    if names:
        return [
            f"--mask-token-id {mask_token_id} is also the tokenizer's {' and '.join(names)} token, "
            "so "
            "real tokens would read as masked (a tokenizer answers with unk or eos for a token it "
            "does "
            "not know); use the id of a token of its own"
        ]
    return []


def resume_problems(args: argparse.Namespace, saved: argparse.Namespace) -> Problems:
    """Returns what of the objective differs from the arguments saved in the checkpoint.

    A checkpoint of another stage (next-token training, a converted one) saved no objective, and
    `--finetune` says that a new stage begins: nothing is compared then.
    """
    if getattr(saved, "bdlm_objective", "none") == "none" or args.finetune:
        return []
    return [
        f"{flag(name)} {getattr(args, name)} differs from {getattr(saved, name)} in the checkpoint "
        "of "
        f"--load {args.load}; use {flag(name)} {getattr(saved, name)}, or --finetune to begin a "
        "new "
        "stage from these weights"
        for name in KEPT_ON_RESUME
        if hasattr(saved, name) and getattr(saved, name) != getattr(args, name)
    ]


def _largest_divisor(number: int, most: int) -> int:
    return max(size for size in range(1, most + 1) if number % size == 0)
