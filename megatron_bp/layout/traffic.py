"""Lists every collective of a step with the bytes one rank sends.

Bytes are counted as collectives move them: an all-gather sends input * (n - 1), a reduce-scatter
output * (n - 1), an all-to-all its remote payload. Numbers are means over the ranks of a group
(they differ only where windows are exchanged). Letters as in memory.py.
Specified by tests/layout/test_traffic.py; tests/comm measures the exchange of keys.
"""

from dataclasses import dataclass
from enum import StrEnum

from megatron_bp.layout.memory import Stage, parameters_of_rank
from megatron_bp.layout.model_shape import AttentionShape, DeltaNetShape, LayerKind
from megatron_bp.layout.pair_counts import owners_of, row_counts, window_rows
from megatron_bp.layout.run_shape import Mode, Recompute, Run


class Axis(StrEnum):
    """The group of ranks a collective runs over."""

    SHARDS = "clean shards"
    CONTEXT = "context"
    TENSOR = "tensor"
    PIPELINE = "pipeline"
    EXPERT = "expert"
    DATA = "data x context"


@dataclass(frozen=True)
class Collective:
    """One kind of message of a step.

    Units: `calls` a step on one rank; `sent_bytes` bytes one rank sends in one call (mean over the
    group); `size` ranks of the group.
    """

    name: str
    axis: Axis
    size: int
    calls: int
    sent_bytes: float

    @property
    def step_bytes(self) -> float:
        """Bytes one rank sends in a step."""
        return self.calls * self.sent_bytes


def gather_count(run: Run) -> int:
    """Times that a layer's clean keys are gathered in a step and micro-batch.

    Once in forward; again when the layer, or only its key buffer, is made again in backward.
    """
    if run.policy.recompute is Recompute.FULL:
        return 2
    return 1 if run.policy.keep_gathered else 2


def clean_rows_sent(run: Run, window: int) -> float:
    """Clean rows one rank sends for one gather: (C - 1) * L / C, or the window's, mean of ranks."""
    request = run.request(window)
    if run.topology.shards == 1:
        return 0.0
    if window and run.topology.windowed_exchange:
        return float(window_rows(request).mean())
    return float((run.topology.shards - 1) * row_counts(request).clean)


def corrupted_rows_sent(run: Run) -> int:
    """Corrupted rows one rank sends for one gather: none, but in the context-parallel baseline."""
    if run.topology.mode is not Mode.CP:
        return 0
    rows = sum(owners_of(run.request()).corrupted.slab_lengths)
    return (run.topology.context - 1) * rows * run.batch.num_views


def kv_row_elements(run: Run, kind: LayerKind) -> int:
    """Elements of K and V of a row on the wire: 2 * Z * M * H / T; once if K = V travels once."""
    mixer = kind.mixer
    assert isinstance(mixer, AttentionShape)
    both = 1 if run.policy.shared_kv_wire and mixer.shared_kv else 2
    kv = both * mixer.num_kv_heads * mixer.head_size * run.batch.micro_batch
    return -(-kv // run.topology.tensor)


def context_collectives(run: Run) -> list[Collective]:
    """Gathers of keys and values and reductions of their gradients, for all attention layers."""
    topology, policy, found = run.topology, run.policy, []
    for kind, count in run.model.layers:
        if not isinstance(kind.mixer, AttentionShape) or topology.context == 1:
            continue
        elements = kv_row_elements(run, kind)
        calls = -(-count * run.num_micro_batches // topology.pipeline)
        name = f"window {kind.mixer.window}" if kind.mixer.window else "full"
        streams = (
            ("clean", Axis.SHARDS, topology.shards, clean_rows_sent(run, kind.mixer.window)),
            ("corrupted", Axis.CONTEXT, topology.context, float(corrupted_rows_sent(run))),
        )
        for stream, axis, size, rows in streams:
            if not rows:
                continue
            gathers = calls * gather_count(run)
            for what, times, width in (
                ("gather", gathers, policy.element_bytes),
                ("reduce", calls, policy.grad_wire_bytes),
            ):
                title = f"{stream} K/V {what} ({name})"
                found.append(Collective(title, axis, size, times, rows * elements * width))
    return found


def delta_collectives(run: Run) -> list[Collective]:
    """Chunk maps of delta layers, gathered in forward, again with the layer, and in backward."""
    found = []
    for kind, count in run.model.layers:
        if isinstance(kind.mixer, DeltaNetShape) and run.topology.shards > 1:
            full = run.policy.recompute in (Recompute.FULL, Recompute.FULL_KEEP_ATTENTION)
            calls = -(-count * run.num_micro_batches // run.topology.pipeline) * (3 if full else 2)
            sent = delta_by_scan_bytes(run, kind.mixer)
            size = run.topology.shards
            found.append(Collective("chunk maps of delta layers", Axis.SHARDS, size, calls, sent))
    return found


def tensor_collectives(run: Run) -> list[Collective]:
    """All-gathers and reduce-scatters of rows between tensor ranks (sequence parallelism).

    A layer: two of each in forward; in backward two of each and two gathers more, of the inputs
    for weight gradients. Full recomputation adds a forward. Source: arXiv 2205.05198, section 4.2.
    """
    tensor = run.topology.tensor
    if tensor == 1:
        return []
    rows = row_counts(run.request()).total * run.batch.micro_batch
    sent = rows * run.model.hidden * run.policy.element_bytes * (tensor - 1) / tensor
    again = {Recompute.NONE: 0, Recompute.SELECTIVE: 2}.get(run.policy.recompute, 4)
    layers = -(-run.model.num_layers * run.num_micro_batches // run.topology.pipeline)
    return [Collective("rows of layers", Axis.TENSOR, tensor, layers * (4 + 6 + again), sent)]


def pipeline_collectives(run: Run) -> list[Collective]:
    """Rows passed on by a middle stage, forward and backward, for each model chunk."""
    topology = run.topology
    if topology.pipeline == 1:
        return []
    rows = row_counts(run.request()).total * run.batch.micro_batch
    sent = rows * run.model.hidden * run.policy.element_bytes / topology.tensor
    calls = 2 * run.num_micro_batches * topology.virtual
    return [Collective("rows between stages", Axis.PIPELINE, topology.pipeline, calls, sent)]


def expert_collectives(run: Run) -> list[Collective]:
    """Dispatch and combination of routed rows: R * k * E * (n - 1) / n each, and back.

    Routing is taken as even. Full recomputation adds a forward.
    """
    topology, found = run.topology, []
    if topology.expert == 1:
        return []
    rows = row_counts(run.request()).total * run.batch.micro_batch
    passes = 2 + (0 if run.policy.recompute is Recompute.NONE else 1)
    for kind, count in run.model.layers:
        width = kind.experts.top_k * run.model.hidden * run.policy.element_bytes
        sent = rows * width * (topology.expert - 1) / topology.expert / topology.tensor
        calls = -(-count * run.num_micro_batches // topology.pipeline) * 2 * passes
        if width:
            found.append(Collective("routed rows", Axis.EXPERT, topology.expert, calls, sent))
    return found


def data_collectives(run: Run) -> list[Collective]:
    """Reduction of gradients and gathering of weights over data and context ranks.

    A sharded optimizer: reduce-scatter of main gradients and all-gather of weights, once a step;
    otherwise an all-reduce, counted as both with gradient bytes. Experts: over 1 / EP of the ranks.
    """
    topology, policy, found = run.topology, run.policy, []
    dense, experts = parameters_of_rank(run, Stage.FIRST)
    ranks = topology.data * topology.context
    weight_bytes = policy.element_bytes if policy.shard_optimizer else policy.main_grad_bytes
    for what, count, size in (
        ("weights", dense, ranks),
        ("experts", experts, ranks // topology.expert),
    ):
        if not count or size == 1:
            continue
        for name, width in (("gradients", policy.main_grad_bytes), ("values", weight_bytes)):
            sent = count * width * (size - 1) / size
            found.append(Collective(f"{name} of {what}", Axis.DATA, size, 1, sent))
    return found


def step_traffic(run: Run) -> list[Collective]:
    """Every collective of a step."""
    parts = (
        context_collectives,
        delta_collectives,
        tensor_collectives,
        pipeline_collectives,
        expert_collectives,
        data_collectives,
    )
    return [collective for part in parts for collective in part(run)]


def attention_gib(run: Run) -> float:
    """Bytes of keys, values and their gradients that one rank sends in a step, in GiB."""
    return sum(c.step_bytes for c in context_collectives(run)) / 2**30


def delta_by_heads_bytes(run: Run, shape: DeltaNetShape) -> float:
    """Bytes one rank sends for one pass of a delta layer whose heads are dealt over context ranks.

    Facts, section 4: clean q, k, v, z and both gates go to head shards (Z * 16480 numbers a row for
    Qwen3.5-27B), outputs come back, and the fp32 state before each block goes to the block's owner.
    The clean stream is stacked once for each view.
    """
    batch, topology, width = run.batch, run.topology, run.policy.element_bytes
    inputs = 2 * shape.key_width + 2 * shape.value_width + 2 * shape.num_value_heads
    rows = batch.num_views * batch.micro_batch * batch.length / topology.context
    moved = rows * (inputs + shape.value_width) * width
    blocks = batch.num_views * batch.micro_batch * batch.length / batch.block_size
    heads = shape.num_value_heads / topology.context
    states = blocks * heads * shape.key_size * shape.value_size * 4
    return (moved + states) / topology.tensor * (topology.context - 1) / topology.context


def delta_by_scan_bytes(run: Run, shape: DeltaNetShape) -> float:
    """Bytes one rank sends for one pass of a delta layer that scans over chunks instead.

    Each of a rank's two chunks is the affine map S -> A S + C of a head (fp32 K x K and K x W),
    gathered by all shards: 2 * heads * K * (K + W) * 4 * (C - 1) bytes. Facts, section 4.
    """
    batch, topology = run.batch, run.topology
    maps = 2 * shape.num_value_heads * shape.key_size * (shape.key_size + shape.value_size) * 4
    streams = batch.micro_batch  # one clean stream serves all views
    return streams * maps * (topology.shards - 1) / topology.tensor
