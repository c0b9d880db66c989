"""Counts floating-point operations of one step: what the objective needs, and what is executed.

Multiply and add are two operations. Norms, rotary embedding, activations, softmax and routing are
left out, as is usual. Numbers are of the busiest rank unless said otherwise.
Letters: R rows, E hidden, N heads, H head size, F feed-forward size, V vocabulary.
Specified by tests/layout/test_flops.py.
"""

from dataclasses import dataclass, replace

from megatron_bp.layout.model_shape import AttentionShape, DeltaNetShape, LayerKind
from megatron_bp.layout.pair_counts import RowCounts, pair_counts, row_counts
from megatron_bp.layout.run_shape import Recompute, Run, Topology

DELTA_CHUNK = 64  # rows that the chunked delta rule works on at a time (facts: FLA, chunk 64)
# Backward of attention: two products a pair in forward (scores, values), five in backward, of
# which one computes the scores again. Source: FlashAttention-2 (arXiv 2307.08691), section 4.
ATTENTION_BACKWARD_NEEDED, ATTENTION_BACKWARD_RUN = 2.0, 2.5


@dataclass(frozen=True)
class Flops:
    """Operations of forward, by what runs them.

    `linear`: matrices between rows and weights; `experts`: the same for routed rows; `attention`:
    scores and values; `delta`: the recurrent part of delta-rule layers; `head`: logits.
    """

    linear: int = 0
    experts: int = 0
    attention: int = 0
    delta: int = 0
    head: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(*(a + b for a, b in zip(self._values, other._values, strict=True)))

    def times(self, count: int) -> "Flops":
        """`count` times as many."""
        return Flops(*(count * value for value in self._values))

    @property
    def _values(self) -> tuple[int, int, int, int, int]:
        return self.linear, self.experts, self.attention, self.delta, self.head

    @property
    def total(self) -> int:
        """All of forward."""
        return sum(self._values)

    @property
    def needed(self) -> int:
        """Forward and backward without computing anything twice: 3x forward."""
        return 3 * self.total


def rows_after_attention(run: Run, rows: RowCounts, pruned: bool) -> int:
    """Rows that go on after attention: all, or the corrupted ones in a pruned last layer."""
    return rows.corrupted if pruned else rows.total


def delta_flops(shape: DeltaNetShape, rows: int) -> int:
    """Forward operations of the chunked gated delta rule over `rows` rows.

    A row and value head: three products with the state (read for the correction, read for the
    output, write), 2 * K * W each, and in the chunk of c rows three products with half-filled
    c x c matrices of keys and three of values: 3 * c * (K + W).
    Derivation: chunkwise form of the delta rule, arXiv 2406.06484, section 3.
    """
    size = 6 * shape.key_size * shape.value_size
    size += 3 * DELTA_CHUNK * (shape.key_size + shape.value_size)
    return rows * shape.num_value_heads * size


def layer_flops(run: Run, kind: LayerKind, pruned: bool = False) -> Flops:
    """Forward operations of one layer for one micro-batch on the busiest rank.

    linear = 2 * R * weights / T; attention = 4 * pairs * N * H / T (scores and values, 2 each).
    """
    batch, tensor, hidden = run.batch, run.topology.tensor, run.model.hidden
    mixer = kind.mixer
    window = mixer.window if isinstance(mixer, AttentionShape) else 0
    request = run.request(window)
    rows = row_counts(request)
    after = rows_after_attention(run, rows, pruned)
    samples = batch.micro_batch
    attention = delta = 0
    if isinstance(mixer, AttentionShape):
        counts = pair_counts(request)
        pairs = counts.corrupted if pruned else counts.total
        attention = 4 * int(pairs.max()) * mixer.query_width
        weights_in, weights_out = hidden * mixer.qkv_width, mixer.query_width * hidden
    else:
        delta = delta_flops(mixer, rows.total)
        weights_out = mixer.value_width * hidden
        weights_in = mixer.parameters(hidden) - weights_out
    ffn = (kind.input_widths + 1) * hidden * kind.ffn + hidden * kind.experts.num_experts
    linear = 2 * (rows.total * weights_in + after * (weights_out + ffn))
    routed = kind.experts.top_k * (kind.input_widths + 1) * hidden * kind.experts.ffn
    parts = Flops(linear, 2 * after * routed, attention, delta).times(samples)
    return Flops(*(-(-value // tensor) for value in parts._values))


def head_flops(run: Run) -> int:
    """Forward operations of the logits for one micro-batch: 2 * targets * E * V / T.

    The mean number of targets is `target_share` of the corrupted rows, plus every clean row once
    if clean rows have a loss (dealt over clean replicas).
    """
    batch, topology = run.batch, run.topology
    rows = row_counts(run.request())
    targets = batch.target_share * rows.corrupted
    if batch.learns_clean:
        targets += batch.length / topology.context
    size = 2 * run.model.hidden * run.model.vocab // topology.tensor
    return round(batch.micro_batch * targets) * size


def model_flops(run: Run) -> Flops:
    """Forward operations of all layers and the head for one micro-batch, over one pipeline."""
    total = Flops(head=head_flops(run))
    kinds = [kind for kind, count in run.model.layers for _ in range(count)]
    last = kinds[-1]
    for kind, count in run.model.layers:
        whole = count - (1 if run.prunes_last_layer and kind is last else 0)
        total += layer_flops(run, kind).times(whole)
    if run.prunes_last_layer:
        total += layer_flops(run, last, pruned=True)
    return total


def executed_flops(run: Run) -> int:
    """Operations that one pipeline of busiest ranks executes for one micro-batch.

    Matrices: 3x forward, the loss too (its gradients are made in forward). Attention: 1 + 2.5.
    Recomputation adds a forward of what is not kept: feed-forward parts (selective), everything
    (full), everything but attention (full, attention kept).
    """
    flops = model_flops(run)
    mixing = flops.attention + flops.delta
    executed = 3 * (flops.linear + flops.experts + flops.head)
    executed += round((1 + ATTENTION_BACKWARD_RUN) * mixing)
    return executed + recomputed_flops(run)


def recomputed_flops(run: Run) -> int:
    """Forward operations that recomputation adds for one micro-batch."""
    flops, kept = model_flops(run), run.policy.recompute
    if kept is Recompute.NONE:
        return 0
    if kept is Recompute.SELECTIVE:
        mixers = sum(
            count * 2 * row_counts(run.request()).total * _mixer_weights(kind, run.model.hidden)
            for kind, count in run.model.layers
        )
        mixers = run.batch.micro_batch * mixers // run.topology.tensor
        return max(0, flops.linear - mixers) + flops.experts
    whole = flops.linear + flops.experts + flops.delta
    return whole + (flops.attention if kept is Recompute.FULL else 0)


def _mixer_weights(kind: LayerKind, hidden: int) -> int:
    mixer = kind.mixer
    if isinstance(mixer, AttentionShape):
        return hidden * (mixer.qkv_width + mixer.query_width)
    return mixer.parameters(hidden)


def needed_flops(run: Run) -> int:
    """Operations that one step of the whole batch needs, whatever the layout: 3x forward.

    Model-FLOPs utilisation is this over seconds, ranks and peak.
    """
    alone = replace(
        run,
        topology=Topology(),
        batch=replace(run.batch, micro_batch=1, global_batch=1),
    )
    return run.batch.global_batch * model_flops(alone).needed
