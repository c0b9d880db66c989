"""Describes one training step: the batch, its split over ranks, and what is kept for backward.

Values only, validated once; what they cost is in pair_counts.py, flops.py, memory.py and
traffic.py. Specified by tests/layout/test_run_shape.py.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache

from megatron_bp.layout.model_shape import AttentionShape, LayerKind, ModelShape
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.plan import PlanRequest
from megatron_bp.layout.visibility import CleanRule, CorruptedRule


class Recompute(StrEnum):
    """What of a layer is computed again in backward instead of being kept."""

    NONE = "none"
    SELECTIVE = "selective"  # the feed-forward part (Megatron: --recompute-modules mlp, or moe)
    FULL = "full"  # the whole layer, attention and its gather included
    FULL_KEEP_ATTENTION = "full_keep_attention"  # like full, but attention's out and LSE stay


class Mode(StrEnum):
    """The modes of one context group, by its degrees."""

    ONE_RANK = "one rank"
    CP = "CP"  # rows by position, corrupted keys travel too
    BP = "pure BP"  # blocks owned, clean rows on every rank
    CSBP = "CSBP"  # blocks owned, clean rows sharded
    HYBRID = "hybrid"  # blocks owned, clean rows sharded over sub-groups


@dataclass(frozen=True)
class BatchShape:
    """One sample as trained, and how many there are in a step.

    Units: `length` clean tokens L, `block_size` tokens, `num_views` corrupted copies,
    `micro_batch` samples at a time, `global_batch` samples in a step, `target_share` mean share of
    all corrupted rows that are targets. `learns_clean`: clean rows have a loss too, so the last
    layer cannot be pruned.
    """

    length: int
    block_size: int
    num_views: int = 1
    clean_rule: CleanRule = CleanRule.TOKEN_CAUSAL
    corrupted_rule: CorruptedRule = CorruptedRule.BIDIRECTIONAL
    micro_batch: int = 1
    global_batch: int = 1
    target_share: float = 0.5
    learns_clean: bool = False


@dataclass(frozen=True)
class Topology:
    """Parallel degrees, in Megatron's words.

    `context` ranks share a sample, `shards` of them its clean rows;
    world = tensor * context * pipeline * data. `virtual` is the number of model chunks a pipeline
    rank holds (interleaved schedule). `expert` ranks share the experts; they are taken from the
    context and data ranks. `block_owned` False is the conventional context-parallel baseline.
    Raises: ValueError listing every problem.
    """

    tensor: int = 1
    context: int = 1
    shards: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    data: int = 1
    block_owned: bool = True
    ownership: Ownership = Ownership.DUAL_END
    windowed_exchange: bool = True

    def __post_init__(self) -> None:
        names = ("tensor", "context", "shards", "pipeline", "virtual", "expert", "data")
        problems = [
            f"{name}={getattr(self, name)} must be at least 1."
            for name in names
            if getattr(self, name) < 1
        ]
        if not problems and self.context % self.shards:
            problems.append(
                f"shards={self.shards} must divide context={self.context}; use 1 or {self.context}."
            )
        if not problems and not self.block_owned and self.shards != self.context:
            problems.append(
                f"block_owned=False needs shards={self.shards} equal to context={self.context}."
            )
        if not problems and (self.context * self.data) % self.expert:
            problems.append(
                f"expert={self.expert} must divide context * data = {self.context * self.data}."
            )
        if problems:
            raise ValueError("topology: " + " ".join(problems))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def sequence_parallel(self) -> bool:
        """Whether rows between the layers' matrices are dealt over tensor ranks."""
        return self.tensor > 1

    @property
    def mode(self) -> Mode:
        """The mode of the context group."""
        if self.context == 1:
            return Mode.ONE_RANK
        if not self.block_owned:
            return Mode.CP
        if self.shards == 1:
            return Mode.BP
        return Mode.CSBP if self.shards == self.context else Mode.HYBRID


@dataclass(frozen=True)
class Policy:
    """What is kept for backward, in which dtypes, and how the optimizer is sharded.

    Units: bytes an element; `loss_chunk_rows` rows of logits at a time. `keep_gathered`: gathered
    clean K/V stay until backward, else they are gathered again. `shared_kv_wire`: where K and V are
    one tensor, it travels once. `fused`: norms, rotary embedding and activation are kernels that
    keep their inputs only (Transformer Engine and Megatron's fusions); else PyTorch's.
    `checks_for_nan`: Megatron looks at the loss and at every bucket of gradients (its default).
    """

    recompute: Recompute = Recompute.NONE
    keep_gathered: bool = True
    prune_last_layer: bool = True
    shard_optimizer: bool = True
    overlap_data_parallel: bool = True
    fused: bool = True
    shared_kv_wire: bool = False
    checks_for_nan: bool = True
    element_bytes: int = 2
    grad_wire_bytes: int = 4
    main_grad_bytes: int = 4
    optimizer_bytes: int = 12
    loss_chunk_rows: int = 1024


@dataclass(frozen=True)
class Run:
    """Everything that decides the cost of one step.

    Raises: ValueError if the batch does not divide over the ranks, or heads or layers do not.
    """

    model: ModelShape
    batch: BatchShape
    topology: Topology
    policy: Policy = Policy()

    def __post_init__(self) -> None:
        problems = run_problems(self.model, self.batch, self.topology)
        if problems:
            raise ValueError(f"run of {self.model.name}: " + " ".join(problems))

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches that one pipeline runs in a step."""
        return self.batch.global_batch // (self.batch.micro_batch * self.topology.data)

    @property
    def prunes_last_layer(self) -> bool:
        """Whether the last layer skips clean rows after their keys and values."""
        batch, policy = self.batch, self.policy
        return policy.prune_last_layer and not (batch.learns_clean or self.model.has_experts)

    def request(self, window: int = 0) -> PlanRequest:
        """The plan request of a layer with `window`."""
        return _request(self.batch, self.topology, window) if window else self._full_request

    @cached_property
    def _full_request(self) -> PlanRequest:
        return _request(self.batch, self.topology, 0)


@lru_cache(maxsize=4096)
def _request(batch: BatchShape, topology: Topology, window: int) -> PlanRequest:
    return PlanRequest(
        length=batch.length,
        block_size=batch.block_size,
        num_ranks=topology.context,
        num_clean_shards=topology.shards,
        num_views=batch.num_views,
        clean_rule=batch.clean_rule,
        corrupted_rule=batch.corrupted_rule,
        window=window,
        ownership=topology.ownership,
        gather_corrupted=topology.mode is Mode.CP,
        row_multiple=topology.tensor if topology.sequence_parallel else 1,
        windowed_exchange=topology.windowed_exchange,
    )


def run_problems(model: ModelShape, batch: BatchShape, topology: Topology) -> list[str]:
    """One sentence for everything of a run that cannot be laid out."""
    problems = []
    per_step = batch.micro_batch * topology.data
    if batch.global_batch % per_step:
        problems.append(
            f"global_batch={batch.global_batch} must be a multiple of micro_batch * data = "
            f"{per_step}; use {-(-batch.global_batch // per_step) * per_step}."
        )
    num_blocks = -(-batch.length // batch.block_size)
    if num_blocks < 2 * topology.context and topology.context > 1:
        problems.append(
            f"length={batch.length} has {num_blocks} blocks, fewer than 2 * context = "
            f"{2 * topology.context}: some ranks would own none; use context="
            f"{max(1, num_blocks // 2)} or smaller blocks."
        )
    stages = topology.pipeline * topology.virtual
    if model.num_layers % stages:
        problems.append(f"pipeline * virtual = {stages} must divide the {model.num_layers} layers.")
    if topology.expert > 1 and not model.has_experts:
        problems.append(f"expert={topology.expert} needs a model with experts; use 1.")
    for kind, _ in model.layers:
        problems += _split_problems(kind, topology)
    return list(dict.fromkeys(problems))


def _split_problems(kind: LayerKind, topology: Topology) -> list[str]:
    problems, tensor = [], topology.tensor
    mixer = kind.mixer
    if isinstance(mixer, AttentionShape):
        heads, groups = mixer.num_heads, mixer.num_kv_heads
        if heads % tensor or (groups % tensor and tensor % groups):
            problems.append(f"tensor={tensor} must divide {heads} heads, {groups} key heads.")
    elif mixer.num_key_heads % tensor or mixer.num_value_heads % tensor:
        problems.append(
            f"tensor={tensor} must divide {mixer.num_key_heads} and {mixer.num_value_heads} heads."
        )
    if kind.ffn % tensor:
        problems.append(f"tensor={tensor} must divide the feed-forward size {kind.ffn}.")
    experts = kind.experts.num_experts
    if experts % topology.expert:
        problems.append(f"expert={topology.expert} must divide {experts} experts.")
    return problems
