"""Predicts the seconds of one step of the busiest rank from counted work and measured speeds.

A closed form: work over speed, plus the communication that has nothing to hide behind, plus what
the GPU waits for its CPU, plus the pipeline's bubble. Which part of a gather is exposed follows
from the order of launches in attention/block_parallel.py. Specified by
tests/planning/test_predict.py and test_host.py.
"""

from dataclasses import dataclass, fields, replace
from enum import StrEnum

from megatron_bp.layout.flops import head_flops, layer_flops, rows_after_attention
from megatron_bp.layout.memory import Stage, gathered_bytes, parameters_of_rank
from megatron_bp.layout.model_shape import AttentionShape, LayerKind
from megatron_bp.layout.pair_counts import row_counts
from megatron_bp.layout.run_shape import Mode, Recompute, Run
from megatron_bp.layout.traffic import (
    Collective,
    clean_rows_sent,
    corrupted_rows_sent,
    data_collectives,
    delta_collectives,
    expert_collectives,
    kv_row_elements,
    pipeline_collectives,
    tensor_collectives,
)
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.hardware import Hardware, KernelSpeed
from megatron_bp.planning.host import HostTime

T = 1e12
# Of a causal square's pairs, those whose key is in its first half: 1 - (1/2)^2. Launches on these
# keys need the early slab only, and the late slab travels meanwhile.
EARLY_SHARE = 0.75
OPTIMIZER_TOUCHES = 2.0  # optimizer state is read and written once a step


class Schedule(StrEnum):
    """When keys travel."""

    OVERLAPPED = "overlapped"  # two slabs, each behind launches that do not need it: ours
    BLOCKING = "blocking"  # gathered and waited for; reduced behind nothing: the published one


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step of the busiest rank; they add up to the step.

    `compute` parts: matrices, attention, head, elementwise, recomputed forward. `exposed` parts:
    keys (context), rows (tensor), experts, data-parallel; `bubble` of the pipeline; `optimizer`;
    `host`: the GPU waits for the CPU that starts its kernels.
    """

    matrices: float = 0.0
    attention: float = 0.0
    head: float = 0.0
    elementwise: float = 0.0
    recomputed: float = 0.0
    exposed_context: float = 0.0
    exposed_tensor: float = 0.0
    exposed_expert: float = 0.0
    exposed_data: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """The step."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def exposed(self) -> float:
        """Communication that nothing hides, without the bubble."""
        names = ("exposed_context", "exposed_tensor", "exposed_expert", "exposed_data")
        return float(sum(getattr(self, name) for name in names))


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one layer and micro-batch: parts of forward, of backward, and exposed keys.

    `gather` and `reduce` are the exposed parts of one gather in forward, of one more in backward,
    and of the reduction.
    """

    matrices: float
    attention_forward: float
    attention_backward: float
    elementwise: float
    gather: float
    gather_again: float
    reduce: float

    @property
    def forward(self) -> float:
        """Seconds of forward without communication."""
        return self.matrices + self.attention_forward + self.elementwise


def layer_time(
    run: Run, kind: LayerKind, cluster: Cluster, schedule: Schedule, pruned: bool = False
) -> LayerTime:
    """Seconds of one layer for one micro-batch on the busiest rank."""
    gpu = cluster.hardware
    work = layer_flops(run, kind, pruned)
    matrices = work.linear / (gpu.matmul_tflops * T)
    matrices += work.experts / (gpu.matmul_tflops * gpu.grouped_matmul_share * T)
    if isinstance(kind.mixer, AttentionShape):
        speed = gpu.kernel_for(kind.mixer)
        forward, backward = attention_seconds(
            work.attention, kind.mixer, speed, gpu, attention_elements(run, kind.mixer, pruned)
        )
        gather, again, reduce = exposed_keys(run, kind, cluster, schedule, (forward, backward))
    else:
        forward = work.delta / (gpu.delta_tflops * T)
        backward, gather, again, reduce = 2.5 * forward, 0.0, 0.0, 0.0
    touched = elementwise_bytes(run, kind) / (gpu.elementwise_tb_s * T)
    return LayerTime(matrices, forward, backward, touched, gather, again, reduce)


def attention_elements(run: Run, shape: AttentionShape, pruned: bool) -> float:
    """Query elements of a rank's rows: Z * R * N * H / T."""
    rows = rows_after_attention(run, row_counts(run.request()), pruned) * run.batch.micro_batch
    return rows * shape.query_width / run.topology.tensor


def attention_seconds(
    flops: int, shape: AttentionShape, speed: KernelSpeed, gpu: Hardware, elements: float
) -> tuple[float, float]:
    """Forward and backward of attention; windowed layers take at least their launches' time."""
    beside = [a + elements * b for a, b in zip(speed.fixed_s, speed.element_s, strict=True)]
    forward = flops / (speed.forward * T) + beside[0]
    backward = 2.5 * flops / (speed.backward * T) + beside[1]
    if shape.window:
        short = max(1.0, gpu.window_layer_s / max(forward + backward, 1e-12))
        return forward * short, backward * short
    return forward, backward


def elementwise_bytes(run: Run, kind: LayerKind) -> float:
    """Bytes that norms, residual sums, rotary embedding and activation move in forward.

    A row: 10 E (two norms, two sums), 3 F (activation), 4 (N + M) H (rotary, packing) elements;
    backward moves twice as many.
    """
    policy, model, tensor = run.policy, run.model, run.topology.tensor
    rows = row_counts(run.request()).total * run.batch.micro_batch
    inner = 3 * (kind.ffn + 3 * kind.experts.top_k * kind.experts.ffn)
    inner += 4 * kind.experts.top_k * model.hidden
    if isinstance(kind.mixer, AttentionShape):
        inner += 4 * (kind.mixer.query_width + kind.mixer.kv_width)
    else:
        inner += 8 * (kind.mixer.key_width + kind.mixer.value_width)
    return rows * (10 * model.hidden + inner) * policy.element_bytes / tensor


def exposed_keys(
    run: Run,
    kind: LayerKind,
    cluster: Cluster,
    schedule: Schedule,
    attention: tuple[float, float],
) -> tuple[float, float, float]:
    """Exposed seconds of one gather in forward, one in backward, and one reduction.

    Overlapped: the early half hides behind nothing but local launches (neglected); the late half,
    and in the context-parallel baseline the corrupted keys, behind launches on early keys. A gather
    for backward runs one layer ahead and hides behind that layer; corrupted keys are not fetched
    ahead. Reductions count in full: launches at own keys run beside them, but that saved no time
    where it was measured (docs/bench/nccl.md).
    Blocking: everything is exposed, and the baseline copies what it gathered into order.
    """
    topology, policy = run.topology, run.policy
    if topology.context == 1:
        return 0.0, 0.0, 0.0
    assert isinstance(kind.mixer, AttentionShape)
    elements = kv_row_elements(run, kind)
    rows = clean_rows_sent(run, kind.mixer.window) * elements
    own_rows = corrupted_rows_sent(run) * elements
    windowed = bool(kind.mixer.window) and topology.windowed_exchange

    def clean(width: int, parts: int = 1) -> float:
        sent, size, stride = rows * width / parts, topology.shards, topology.tensor
        if windowed:
            return cluster.all_to_all_seconds(sent, size, stride)
        flat = cluster.ring_seconds(sent, size, stride)
        return min(flat, cluster.two_step_seconds(sent, size, stride))

    def own(width: int) -> float:
        return cluster.ring_seconds(own_rows * width, topology.context, topology.tensor)

    there, back = policy.element_bytes, policy.grad_wire_bytes
    if schedule is Schedule.BLOCKING:
        order = 0.0
        if topology.mode is Mode.CP:
            order = 2 * gathered_bytes(run, kind) / (cluster.hardware.elementwise_tb_s * T)
        whole = clean(there) + own(there) + order
        return whole, whole, clean(back) + own(back) + order
    if windowed:  # one message each way, behind launches on local keys
        return (
            max(0.0, clean(there) + own(there) - attention[0] / 2),
            max(0.0, clean(there) - sum(attention)) + own(there),
            clean(back) + max(0.0, own(back) - attention[1] / 2),
        )
    gather, reduce = clean(there, 2), clean(back, 2)
    return (
        gather + max(0.0, gather + own(there) - EARLY_SHARE * attention[0]),
        max(0.0, 2 * gather - sum(attention)) + own(there),
        2 * reduce + own(back),
    )


def predict(run: Run, cluster: Cluster, schedule: Schedule = Schedule.OVERLAPPED) -> StepTime:
    """Seconds of one step of `run`."""
    batches, topology, gpu = run.num_micro_batches, run.topology, cluster.hardware
    host = gpu.host.of(run)
    sums = {name: 0.0 for name in StepTime.__dataclass_fields__}
    sums["exposed_context"] = _seconds(delta_collectives(run), cluster, run)
    sums["exposed_tensor"] = _seconds(tensor_collectives(run), cluster, run)
    sums["exposed_expert"] = _seconds(expert_collectives(run), cluster, run)
    rows = sums["exposed_tensor"] + sums["exposed_expert"]
    beside = rows / (run.model.num_layers / topology.pipeline * batches)
    last = run.model.layers[-1][0]
    for kind, count in run.model.layers:
        plain = count - (1 if run.prunes_last_layer and kind is last else 0)
        for times, pruned in ((plain, False), (count - plain, True)):
            if times:
                layer = layer_time(run, kind, cluster, schedule, pruned)
                parts = _layer_parts(layer, run, host, beside)
                for name, seconds in parts.items():
                    sums[name] += seconds * times * batches / topology.pipeline
    # A stage with the head is the busiest; the others wait for it.
    head = run_head_seconds(run, gpu)
    sums["head"] = head * batches
    sums["host"] += (host.micro_batch + host.late_head(head)) * batches
    busy = sum(sums.values())
    hops = 2 * (topology.pipeline - 1)
    for collective in pipeline_collectives(run):
        sums["bubble"] += hops * cluster.seconds(collective, run.topology) / collective.calls
    sums["bubble"] += busy * (topology.pipeline - 1) / (batches * topology.virtual)
    sums["exposed_data"] = exposed_data_seconds(run, cluster, busy / batches)
    sums["optimizer"] = optimizer_seconds(run, gpu)
    sums["host"] += host.step + host.check * num_checks(run)
    return StepTime(**sums)


def _layer_parts(layer: LayerTime, run: Run, host: HostTime, beside: float) -> dict[str, float]:
    """Seconds of one layer and micro-batch by part of `StepTime`.

    `beside`: communication of rows, of which a third is forward.
    """
    kept, recomputed = run.policy.recompute, 0.0
    exposed = layer.gather + layer.reduce
    if kept is Recompute.SELECTIVE:
        recomputed = _ffn_share(run) * (layer.matrices + layer.elementwise)
    elif kept is not Recompute.NONE:
        recomputed = layer.matrices + layer.elementwise
        if kept is Recompute.FULL:
            recomputed += layer.attention_forward
            exposed += layer.gather
    if not run.policy.keep_gathered and kept is not Recompute.FULL:
        exposed += layer.gather_again
    parts = {
        "matrices": 3 * layer.matrices,
        "attention": layer.attention_forward + layer.attention_backward,
        "elementwise": 3 * layer.elementwise,
        "exposed_context": exposed,
        "recomputed": recomputed,
    }
    forward = layer.forward + layer.gather
    backward = sum(parts.values()) - forward
    late = host.late_forward(forward + beside / 3)
    return parts | {"host": late + host.late_backward(kept, backward + beside * 2 / 3)}


def exposed_data_seconds(run: Run, cluster: Cluster, behind: float) -> float:
    """What of gradients and weights on the wire nothing hides; `behind` is a micro-batch's time.

    Forward begins with the embedding table, so its gather hides behind nothing; nor does the
    reduction of its gradient, which backward makes last. Of the rest, 5 % of what is hidden.
    """
    data = _seconds(data_collectives(run), cluster, run)
    if not run.policy.overlap_data_parallel:
        return data
    table = run.model.vocab * run.model.hidden / run.topology.tensor
    share = min(1.0, table / parameters_of_rank(run, Stage.FIRST)[0])
    ends = sum(
        cluster.seconds(replace(collective, sent_bytes=share * collective.sent_bytes), run.topology)
        for collective in data_collectives(run)
        if "experts" not in collective.name
    )
    rest = max(0.0, data - ends)
    return ends + max(0.0, rest - behind) + 0.05 * min(rest, behind)


def num_checks(run: Run) -> float:
    """How often a step waits for Megatron's checks: a bucket a layer, two at the ends, the loss.

    Buckets are looked at as they are filled, if they are reduced then.
    """
    topology, policy = run.topology, run.policy
    if not policy.checks_for_nan:
        return 0.0
    buckets = policy.overlap_data_parallel and topology.data * topology.context > 1
    return run.num_micro_batches + (run.model.num_layers / topology.pipeline + 1) * buckets


def _ffn_share(run: Run) -> float:
    """Share of the layers' matrices that are feed-forward, by weights."""
    model = run.model
    mixers = sum(n * k.mixer.parameters(model.hidden) for k, n in model.layers)
    active = 0
    for kind, count in model.layers:
        routed = kind.experts.top_k * (kind.input_widths + 1) * model.hidden * kind.experts.ffn
        active += count * (kind.dense_parameters(model.hidden) + routed)
    return 1.0 - mixers / active


def run_head_seconds(run: Run, gpu: Hardware) -> float:
    """Seconds of logits and loss for one micro-batch: three products at the fused loss's speed."""
    return 3 * head_flops(run) / (gpu.head_tflops * T)


def optimizer_seconds(run: Run, gpu: Hardware) -> float:
    """Seconds of the optimizer: its state, gradients and weights pass through memory."""
    policy, topology = run.policy, run.topology
    weights = sum(parameters_of_rank(run, Stage.FIRST))
    replicas = topology.data * topology.context if policy.shard_optimizer else 1
    touched = OPTIMIZER_TOUCHES * policy.optimizer_bytes + policy.main_grad_bytes
    return weights * touched / replicas / (gpu.elementwise_tb_s * T)


def _seconds(collectives: list[Collective], cluster: Cluster, run: Run) -> float:
    return sum(cluster.seconds(collective, run.topology) for collective in collectives)


def tokens_per_second(run: Run, step: StepTime) -> float:
    """Clean tokens of the whole job a second."""
    return run.batch.global_batch * run.batch.length / step.total
