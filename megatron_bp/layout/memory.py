"""Counts the bytes one rank holds at the peak of a step: weights, gradients, activations, ...

What the allocator adds (fragments, library workspaces, communication buffers) is not in here; a
planner keeps a reserve for it. Letters as in flops.py; T tensor ranks, Z samples, S buffer rows.
Specified by tests/layout/test_memory.py, which counts what a small layer saves.
"""

from dataclasses import dataclass, fields
from enum import StrEnum

from megatron_bp.layout.flops import rows_after_attention
from megatron_bp.layout.model_shape import AttentionShape, LayerKind
from megatron_bp.layout.pair_counts import row_counts, window_rows
from megatron_bp.layout.run_shape import Mode, Recompute, Run

LSE_BYTES = RMS_BYTES = ROUTER_BYTES = WIDE_BYTES = 4  # fp32
LOSS_PIECE_COLUMNS = 16384  # columns of fp32 logits at a time in the fused loss


class Stage(StrEnum):
    """The two ends of a pipeline: the first holds most micro-batches, the last the head."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of one rank at the peak.

    `activations`: what layers keep for backward, over all micro-batches in flight. `gathered_kv`:
    the key buffers among them. `workspace`: the largest temporary of one layer's backward, with one
    layer's activations under full recomputation. `logits`: what the loss adds: the gradient of a
    tied table until the end of backward; or all that lives in the loss, if that is the peak.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered_kv: int
    workspace: int
    logits: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, field.name) for field in fields(self))


def buffer_rows(run: Run, window: int) -> int:
    """Rows of the clean key buffer: all of the sample's, or own and received ones (windowed)."""
    request = run.request(window)
    rows = row_counts(request)
    if window and run.topology.windowed_exchange and run.topology.shards > 1:
        return rows.clean + int(window_rows(request).max())
    return rows.clean * run.topology.shards


def gathered_bytes(run: Run, kind: LayerKind) -> int:
    """Key buffer of one layer and micro-batch: 2 * Z * S * M * H / T elements.

    The context-parallel baseline holds the corrupted keys of all ranks too.
    """
    if not isinstance(kind.mixer, AttentionShape):
        return 0
    clean = _key_bytes(run, kind.mixer, buffer_rows(run, kind.mixer.window))
    return clean + corrupted_keys_bytes(run, kind)


def corrupted_keys_bytes(run: Run, kind: LayerKind) -> int:
    """What of it the context-parallel baseline holds: corrupted keys of all ranks."""
    if not isinstance(kind.mixer, AttentionShape) or run.topology.mode is not Mode.CP:
        return 0
    return _key_bytes(run, kind.mixer, run.batch.num_views * run.batch.length)


def _key_bytes(run: Run, mixer: AttentionShape, rows: int) -> int:
    kv = 2 * mixer.num_kv_heads * mixer.head_size
    return -(-run.batch.micro_batch * rows * kv * run.policy.element_bytes // run.topology.tensor)


def attention_kept_bytes(run: Run, kind: LayerKind, pruned: bool = False) -> int:
    """Output and LSE of one layer: Z * R * N * (H * bytes + 4) / T; of a delta layer the output."""
    batch, mixer = run.batch, kind.mixer
    rows = rows_after_attention(run, row_counts(run.request()), pruned) * batch.micro_batch
    if isinstance(mixer, AttentionShape):
        a_row = mixer.num_heads * (mixer.head_size * run.policy.element_bytes + LSE_BYTES)
    else:
        a_row = mixer.value_width * run.policy.element_bytes
    return rows * a_row // run.topology.tensor


def norm_bytes(run: Run, rows: int) -> int:
    """What one norm of `rows` rows keeps: input, output (for the matrix after it) and 1 / RMS.

    Rows are dealt over tensor ranks. PyTorch's norm keeps the normalised rows too.
    """
    copies = 2 if run.policy.fused else 3
    a_row = copies * run.model.hidden * run.policy.element_bytes + RMS_BYTES
    return rows * a_row // run.topology.tensor


def mixer_bytes(run: Run, kind: LayerKind, pruned: bool = False) -> int:
    """What the mixer half of a layer keeps, without key buffers.

    A row: the norm; the projection's whole output (v is a view of it), q and k after the rotary
    embedding, a copy of q before its head norm; the output and LSE. The output projection keeps
    attention's output, which is counted once. Unfused: normalised heads, and sines and cosines for
    q and for k. Delta layers: the projections' outputs, before and after the convolution.
    Derivation: arXiv 2205.05198, section 4.1, with grouped heads and without dropout; what a view
    keeps alive was counted.
    """
    policy, mixer = run.policy, kind.mixer
    rows = row_counts(run.request()).total * run.batch.micro_batch
    small = 0
    if isinstance(mixer, AttentionShape):
        turned = mixer.query_width + mixer.kv_width
        inner = mixer.qkv_width + turned
        if mixer.qk_norm:
            inner += mixer.query_width + (0 if policy.fused else turned)
            small = (mixer.num_heads + mixer.num_kv_heads) * RMS_BYTES
        if mixer.output_gate:  # the gate, and the gated output beside the plain one
            inner += 2 * mixer.query_width
    else:
        inner = 2 * (2 * mixer.key_width + mixer.value_width) + 2 * mixer.value_width
    split = rows * (inner * policy.element_bytes + small) // run.topology.tensor
    if not policy.fused and isinstance(mixer, AttentionShape):
        split += rows * 4 * mixer.head_size * WIDE_BYTES
    return norm_bytes(run, rows) + split + attention_kept_bytes(run, kind, pruned)


def inner_widths(run: Run, kind: LayerKind) -> int:
    """Inner-size numbers a row of the feed-forward part keeps, in inner sizes.

    Gated and fused: the first matrix's output (2) and the second's input (1). PyTorch's operations
    keep the activated half and the other half (plus an offset) as well.
    """
    return kind.input_widths + 1 + (2 if kind.gated and not run.policy.fused else 0)


def ffn_bytes(run: Run, kind: LayerKind, pruned: bool = False) -> int:
    """What the feed-forward half keeps: the norm, and the inner activations.

    Routed rows keep the same per expert, their input, and the router's fp32 probabilities.
    """
    policy, topology = run.policy, run.topology
    rows = rows_after_attention(run, row_counts(run.request()), pruned) * run.batch.micro_batch
    widths, experts = inner_widths(run, kind), kind.experts
    split = widths * kind.ffn * policy.element_bytes
    if experts.num_experts:
        inner = run.model.hidden + widths * experts.ffn
        split += experts.top_k * inner * policy.element_bytes
        split += experts.num_experts * ROUTER_BYTES
    return norm_bytes(run, rows) + rows * split // topology.tensor


def layer_input_bytes(run: Run) -> int:
    """One layer's input: Z * R * E / T elements."""
    rows = row_counts(run.request()).total * run.batch.micro_batch
    return rows * run.model.hidden * run.policy.element_bytes // run.topology.tensor


def kept_bytes(run: Run, kind: LayerKind, pruned: bool = False) -> tuple[int, int]:
    """(Activations, key buffers) that one layer keeps for one micro-batch, by the policy.

    Selective recomputation runs the feed-forward part again from its norm's output.
    """
    policy = run.policy
    if policy.recompute is Recompute.FULL:
        return layer_input_bytes(run), 0
    gathered = gathered_bytes(run, kind) if policy.keep_gathered else 0
    if policy.recompute is Recompute.FULL_KEEP_ATTENTION:
        return layer_input_bytes(run) + attention_kept_bytes(run, kind, pruned), gathered
    if policy.recompute is Recompute.SELECTIVE:
        rows = rows_after_attention(run, row_counts(run.request()), pruned) * run.batch.micro_batch
        return mixer_bytes(run, kind, pruned) + norm_bytes(run, rows), gathered
    return mixer_bytes(run, kind, pruned) + ffn_bytes(run, kind, pruned), gathered


def workspace_bytes(run: Run, kind: LayerKind, pruned: bool = False) -> int:
    """The largest temporary of one layer's backward, over what the layer keeps.

    Backward frees the feed-forward part before it comes to the mixer, so it is the larger of two.
    """
    return max(_feed_forward_workspace(run, kind, pruned), _mixer_workspace(run, kind, pruned))


def _feed_forward_workspace(run: Run, kind: LayerKind, pruned: bool) -> int:
    """What is run again, gradients of the first matrix's output (2 inner sizes, gated; the second's
    input is freed for its own), and clean keys that are on their way for the mixer.
    """
    policy, again = run.policy, 0
    rows = rows_after_attention(run, row_counts(run.request()), pruned) * run.batch.micro_batch
    if policy.recompute is not Recompute.NONE:
        again = ffn_bytes(run, kind, pruned)
    if policy.recompute in (Recompute.FULL, Recompute.FULL_KEEP_ATTENTION):
        again += mixer_bytes(run, kind, pruned)
    inner = kind.ffn + kind.experts.top_k * kind.experts.ffn
    inner *= kind.input_widths * policy.element_bytes
    return again + rows * inner // run.topology.tensor + _fetched_bytes(run, kind)


def _fetched_bytes(run: Run, kind: LayerKind) -> int:
    """The clean key buffer of a layer that did not keep it."""
    if run.policy.keep_gathered and run.policy.recompute is not Recompute.FULL:
        return 0
    return gathered_bytes(run, kind) - corrupted_keys_bytes(run, kind)


def _mixer_workspace(run: Run, kind: LayerKind, pruned: bool) -> int:
    """The mixer that was run again, less the feed-forward part that a layer kept and that is gone.

    Attention: gradients of q and out, and those of q once more in fp32, of k and v; key buffers
    that were not kept, and the next layer's clean one, if it is gathered ahead; fp32 gradients of
    the clean one, and what goes on the wire of them if that is another type. Corrupted keys of the
    context-parallel baseline: fp32 gradients, a copy in order, and the reduction's buffer, beside
    the operands of their gather.
    """
    policy, tensor, mixer = run.policy, run.topology.tensor, kind.mixer
    rows = row_counts(run.request()).total * run.batch.micro_batch
    again = -ffn_bytes(run, kind, pruned) if policy.recompute is Recompute.NONE else 0
    if policy.recompute in (Recompute.FULL, Recompute.FULL_KEEP_ATTENTION):
        again = mixer_bytes(run, kind, pruned)
    if not isinstance(mixer, AttentionShape):
        return again + rows * 4 * mixer.value_width * policy.element_bytes // tensor
    after = rows_after_attention(run, row_counts(run.request()), pruned) * run.batch.micro_batch
    found = after * mixer.query_width * (2 * policy.element_bytes + WIDE_BYTES)
    found += rows * 2 * mixer.kv_width * policy.element_bytes
    corrupted = corrupted_keys_bytes(run, kind)
    clean, fetched = gathered_bytes(run, kind) - corrupted, _fetched_bytes(run, kind)
    ahead = fetched if policy.recompute in (Recompute.NONE, Recompute.SELECTIVE) else 0
    keys = fetched + ahead + (corrupted if fetched else 0)
    keys += (clean + 3 * corrupted) * WIDE_BYTES // policy.element_bytes + corrupted
    if policy.grad_wire_bytes != WIDE_BYTES:
        keys += clean * policy.grad_wire_bytes // policy.element_bytes
    return again + found // tensor + keys


def logits_bytes(run: Run) -> int:
    """Memory of the fused loss: gradients of a chunk's logits, fp32 logits of a piece of columns,
    fp32 d hidden of a chunk, and the half of the fp32 sum of d weight that is no gradient buffer.

    Measured as 1.916 GiB at 2,048 rows, E 5120, V 131072 (docs/bench/loss.md); this gives 1.914.
    """
    chunk, tensor = run.policy.loss_chunk_rows, run.topology.tensor
    columns = -(-run.model.vocab // tensor)
    bytes_ = chunk * columns * run.policy.element_bytes
    bytes_ += chunk * min(columns, LOSS_PIECE_COLUMNS) * WIDE_BYTES
    bytes_ += chunk * run.model.hidden * WIDE_BYTES
    return bytes_ + columns * run.model.hidden * (WIDE_BYTES - run.policy.element_bytes)


def table_gradient_bytes(run: Run) -> int:
    """The gradient of the head's weight as the loss makes it, in fp32 storage.

    A weight that is the embedding table as well gets two gradients, and autograd holds the first
    one, the head's, until backward comes to the embedding.
    """
    wide = max(WIDE_BYTES, run.policy.element_bytes)
    return -(-run.model.vocab // run.topology.tensor) * run.model.hidden * wide


def parameters_of_rank(run: Run, stage: Stage) -> tuple[int, int]:
    """(Weights without experts, experts' weights) of one rank of a pipeline's first or last stage.

    Layers are dealt evenly over stages; the table is on the first stage and the head on the last;
    a tied head is a second copy there. Norms and routers are not split, which is neglected in
    1 / T (they are below 0.1 %).
    """
    model, topology = run.model, run.topology
    table = model.vocab * model.hidden
    ends = table if topology.pipeline > 1 else table * (1 if model.tied else 2)
    if topology.pipeline == 1 or stage is Stage.LAST:
        ends += model.hidden
    dense = -(-model.dense_layer_parameters // topology.pipeline) + ends
    experts = -(-model.expert_parameters // topology.pipeline)
    return -(-dense // topology.tensor), -(-experts // (topology.tensor * topology.expert))


def micro_batches_in_flight(run: Run, stage: Stage) -> tuple[int, int]:
    """(Layers, of which kept at once) as a fraction: micro-batches whose activations a stage holds.

    1F1B: min(micro-batches, stages left). Interleaved: 1 + (p - 1) / (p * v) times p.
    Source: arXiv 2205.05198, appendix B; arXiv 2104.04473, section 2.2.
    """
    pipeline, virtual = run.topology.pipeline, run.topology.virtual
    if pipeline == 1 or stage is Stage.LAST:
        chunks = virtual if pipeline > 1 else 1
        return chunks, virtual if pipeline > 1 else 1
    chunks = pipeline * virtual + (pipeline - 1 if virtual > 1 else 0)
    return min(chunks, run.num_micro_batches * virtual), virtual


def rank_memory(run: Run, stage: Stage = Stage.FIRST) -> MemoryBytes:
    """Bytes that a rank of one end of the pipeline holds at its peak.

    Gradients and optimizer: fp32 main gradients, and with a sharded (distributed) optimizer 12
    bytes a weight (fp32 weight and two moments) over data * context ranks; experts' over
    data * context / expert.
    """
    policy, topology = run.policy, run.topology
    dense, experts = parameters_of_rank(run, stage)
    replicas = topology.data * topology.context if policy.shard_optimizer else 1
    expert_replicas = max(1, replicas // topology.expert)
    optimizer = dense * policy.optimizer_bytes // replicas
    optimizer += experts * policy.optimizer_bytes // expert_replicas
    chunks, virtual = micro_batches_in_flight(run, stage)
    share = topology.pipeline * virtual
    has_head = topology.pipeline == 1 or stage is Stage.LAST
    activations = gathered = saved = 0
    for kind, count in run.model.layers:
        kept, buffers = kept_bytes(run, kind)
        activations += count * kept
        gathered += count * buffers
        saved = kept - kept_bytes(run, kind, run.prunes_last_layer)[0]  # of the last layer
    rows = row_counts(run.request())
    last = rows_after_attention(run, rows, run.prunes_last_layer) * run.batch.micro_batch
    last_norm = norm_bytes(run, last) - saved if has_head else 0
    workspace = _workspace(run, has_head)
    held = table_gradient_bytes(run) if run.model.tied and topology.pipeline == 1 else 0
    of_loss = logits_bytes(run) + table_gradient_bytes(run) // 2
    return MemoryBytes(
        parameters=(dense + experts) * policy.element_bytes,
        gradients=(dense + experts) * policy.main_grad_bytes,
        optimizer=optimizer,
        activations=-(-activations * chunks // share) + last_norm,
        gathered_kv=-(-gathered * chunks // share),
        workspace=workspace,
        logits=max(held, of_loss - workspace) if has_head else 0,
    )


def _workspace(run: Run, has_head: bool) -> int:
    """The largest temporary of a stage's layers; other layers follow a pruned last one, whose own
    part of the activations is gone by then."""
    last = run.model.layers[-1][0]
    if not (run.prunes_last_layer and has_head):
        return max(workspace_bytes(run, kind) for kind, _ in run.model.layers)
    freed, pruned = sum(kept_bytes(run, last, True)), workspace_bytes(run, last, True)
    if run.model.num_layers == run.topology.pipeline:
        return pruned
    others = [kind for kind, count in run.model.layers if kind is not last or count > 1]
    return max(pruned, *(workspace_bytes(run, kind) - freed for kind in others))


def peak_memory(run: Run) -> MemoryBytes:
    """The fuller of both ends of the pipeline."""
    stages = Stage if run.topology.pipeline > 1 else (Stage.FIRST,)
    return max((rank_memory(run, stage) for stage in stages), key=lambda memory: memory.total)
