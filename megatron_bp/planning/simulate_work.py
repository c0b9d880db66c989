"""Says how long each rank computes in each part of a layer, by what its keys wait for.

The same counts and speeds as predict.py, but of every rank instead of the busiest, and attention
apart by phase: launches on local keys, on keys of the early slab, on keys of the late one. Phases
follow attention/block_parallel.py up to the first block of each chunk. Specified by
tests/planning/test_simulate.py.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.decomposition import Availability, Phase
from megatron_bp.layout.flops import layer_flops, rows_after_attention
from megatron_bp.layout.model_shape import AttentionShape, LayerKind
from megatron_bp.layout.owners import ChunkMap
from megatron_bp.layout.pair_counts import owners_of, row_counts
from megatron_bp.layout.plan import PlanRequest
from megatron_bp.layout.run_shape import Run
from megatron_bp.layout.visibility import CleanRule, visibility_of
from megatron_bp.planning.cluster import Cluster
from megatron_bp.planning.predict import (
    T,
    attention_elements,
    attention_seconds,
    elementwise_bytes,
)

PHASES = ("local", "early", "late")


@dataclass(frozen=True, eq=False)
class PhasePairs:
    """Attention pairs of each context rank, float64 [2, 3, P], clean and corrupted rows.

    First index 0: by the phase that brings their keys; 1: by the slab that takes the gradients of
    their keys, whose launches run first in backward and whose reduction starts after them.
    """

    clean: NDArray[np.float64]
    corrupted: NDArray[np.float64]

    def of_rows(self, corrupted_only: bool) -> NDArray[np.float64]:
        """Pairs of all rows, or of the corrupted ones."""
        return self.corrupted if corrupted_only else self.clean + self.corrupted


@lru_cache(maxsize=64)
def phase_pairs(request: PlanRequest) -> PhasePairs:
    """Pairs of each rank, split by phase.

    A row's own block and the keys just before it are local: (3 B - 1) / 2 keys a row. The other
    pairs of a chunk wait for all keys before its end, or as far back as its window reaches.
    """
    of_chunk, ranks = _pairs_of_chunks(request), request.num_ranks
    owners, shards = owners_of(request), request.num_clean_shards
    near = (3 * request.block_size - 1) / 2
    clean = _by_phase(request, owners.clean, of_chunk[0], near, clean=True)
    corrupted = _by_phase(request, owners.corrupted, of_chunk[1], near, clean=False)
    return PhasePairs(np.tile(clean, (1, 1, ranks // shards)), request.num_views * corrupted)


def _pairs_of_chunks(request: PlanRequest) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of the clean and of one view's corrupted rows of each chunk."""
    blocks, owners = request.blocks, owners_of(request)
    position, found = np.arange(blocks.length), []
    for stream, chunks in ((0, owners.clean), (1, owners.corrupted)):
        seen = visibility_of(np.full(blocks.length, stream), position, blocks, request.rules)
        keys = seen.clean_hi.astype(np.int64) - seen.clean_lo + (seen.own_hi - seen.own_lo)
        found.append(np.diff(np.concatenate([[0], np.cumsum(keys)])[chunks.bounds]))
    return found[0], found[1]


def _by_phase(
    request: PlanRequest, chunks: ChunkMap, pairs: NDArray[np.int64], near: float, clean: bool
) -> NDArray[np.float64]:
    """Pairs of the ranks of `chunks`, [2, 3, ranks]."""
    found = np.zeros((2, 3, chunks.num_ranks))
    one_slab = request.window > 0 and request.windowed_exchange
    causal = clean and request.clean_rule is CleanRule.TOKEN_CAUSAL  # one launch, nothing apart
    own_keys = 2 if request.gather_corrupted and not clean else 0  # they travel last
    held = owners_of(request).clean
    for rank, mine in enumerate(chunks.chunks_of):
        here = Availability(held, rank % held.num_ranks, one_slab, Phase.LOCAL)
        for chunk in mine:
            lo, hi = chunks.span(chunk)
            local = 0.0 if causal else min(float(pairs[chunk]), near * (hi - lo))
            if lo == hi:
                continue
            found[0, own_keys, rank] += local
            start = max(0, lo - request.window + 1) if request.window else 0
            found[0, here.ready(start, hi), rank] += pairs[chunk] - local
            found[1, here.slab(start, hi), rank] += pairs[chunk]
    return found


@dataclass(frozen=True, eq=False)
class LayerWork:
    """Seconds of one layer's forward for one micro-batch on each context rank.

    `before` attention (input projection), `after` it (output projection), `ffn`, `experts`; half of
    the elementwise work is in `before`, half in `ffn`. Matrices take twice as long backward.
    Shapes: `forward`, `backward` float64 [3, P], attention by phase; zero for other mixers, whose
    time is in `mixer` (forward, backward).
    """

    before: float
    after: float
    ffn: float
    experts: float
    mixer: tuple[float, float]
    forward: NDArray[np.float64]
    backward: NDArray[np.float64]


def layer_work(run: Run, kind: LayerKind, cluster: Cluster, pruned: bool) -> LayerWork:
    """Seconds of a layer; `pruned` is a last layer that skips clean rows."""
    gpu, mixer = cluster.hardware, kind.mixer
    work = layer_flops(run, kind, pruned)
    linear = work.linear / (gpu.matmul_tflops * T)
    elementwise = elementwise_bytes(run, kind) / (gpu.elementwise_tb_s * T)
    share_in, share_out = _matrix_shares(run, kind, pruned)
    none = np.zeros((3, run.topology.context))
    forward = backward = none
    other = (0.0, 0.0)
    if isinstance(mixer, AttentionShape):
        pairs = phase_pairs(_shared(run.request(mixer.window))).of_rows(pruned)
        elements = attention_elements(run, mixer, pruned)
        seconds = attention_seconds(work.attention, mixer, gpu.kernel_for(mixer), gpu, elements)
        busiest = max(float(pairs[0].sum(axis=0).max()), 1.0)
        forward, backward = (p * (s / busiest) for p, s in zip(pairs, seconds, strict=True))
    else:
        delta = work.delta / (gpu.delta_tflops * T)
        other = (delta, 2.5 * delta)
    return LayerWork(
        before=linear * share_in + elementwise / 2,
        after=linear * share_out,
        ffn=linear * (1 - share_in - share_out) + elementwise / 2,
        experts=work.experts / (gpu.matmul_tflops * gpu.grouped_matmul_share * T),
        mixer=other,
        forward=forward,
        backward=backward,
    )


def _matrix_shares(run: Run, kind: LayerKind, pruned: bool) -> tuple[float, float]:
    """Shares of the layer's matrix work before attention and in the output projection."""
    hidden, mixer = run.model.hidden, kind.mixer
    rows = row_counts(run.request())
    after = rows_after_attention(run, rows, pruned)
    width = mixer.query_width if isinstance(mixer, AttentionShape) else mixer.value_width
    if isinstance(mixer, AttentionShape):
        weights_in = hidden * mixer.qkv_width
    else:
        weights_in = mixer.parameters(hidden) - width * hidden
    ffn = (kind.input_widths + 1) * hidden * kind.ffn + hidden * kind.experts.num_experts
    parts = (rows.total * weights_in, after * width * hidden, after * ffn)
    return parts[0] / sum(parts), parts[1] / sum(parts)


def _shared(request: PlanRequest) -> PlanRequest:
    """The request without what pairs do not depend on, so that they are counted once."""
    return replace(request, row_multiple=1)
