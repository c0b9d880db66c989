"""Corrupts a sample: masked views, labels and weights as a pure function of seed and sample index.

Owns the random numbers. Every rank of a context group calls `corrupt` for the whole sample and
slices its rows, so noise depends on no layout and needs no generator state to resume. Knows nothing
of ranks, devices or torch. Specified by tests/objectives/test_noise.py.

Counter layout: draw i of a stream is word i % 4 of Philox4x64-10 under the key (seed, sample_index)
at the counter (i // 4 + 1, 0, 0, stream). A draw therefore never depends on how many others are
made. The streams are listed in `Stream`.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_bp.layout.blocks import BlockTable
from megatron_bp.objectives.objective import (
    NUM_BUCKETS,
    Canvas,
    Normalizer,
    Objective,
    TSampling,
    Weight,
)


class Stream(IntEnum):
    """Which of a sample's draws are for what; the numbers are frozen, they define the noise."""

    TOKEN = 0  # draw p: is the token at position p masked
    LEVEL = 1  # independent: draw p for the block that starts at p; antithetic: draw 0 alone
    STRATUM = 2  # antithetic: draws [0, num_blocks), whose order permutes the strata
    REPLACEMENT = 3  # uniform canvas: draw p is the token shown at position p, if corrupted


@dataclass(frozen=True)
class Corruption:
    """The corrupted views of one sample with what each of their rows is to learn.

    A row is a target if its weight is positive; elsewhere its label is 0. The views' part of the
    sample's loss is sum(weights * cross_entropy) / max(normalizer, 1). `counted` marks each row
    that adds one to the normalizer, so ranks that split the rows split the normalizer too. `t` is
    the noise level; `bucket` says in which quarter of the levels a target's token is.
    `next_labels` has the token that each clean row is to predict, -1 where none; the clean
    stream's part is the mean cross-entropy over them.

    Shapes: `tokens`, `labels`, `bucket` int64, `weights` float64, `counted` bool, all
    [num_views, length]; `t` float64, `next_labels` int64 [length].
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float64]
    counted: NDArray[np.bool_]
    bucket: NDArray[np.int64]
    next_labels: NDArray[np.int64]
    normalizer: int
    t: NDArray[np.float64]


def corrupt(
    tokens: NDArray[Any],
    supervised: NDArray[np.bool_],
    blocks: BlockTable,
    objective: Objective,
    *,
    mask_token_id: int,
    seed: int,
    sample_index: int,
    vocab_size: int = 0,
) -> Corruption:
    """The corruption of one sample, the same wherever and whenever it is computed.

    View 0 corrupts a supervised token with the probability t of its block; view 1, if there is one,
    corrupts the other supervised tokens. Unsupervised tokens are never corrupted and never targets,
    nor is a block's first token on a seed_and_mask canvas. With a label shift the first token of a
    document is never a target: the row before it is in another. `vocab_size` bounds the random
    tokens of a uniform canvas, which alone reads it.

    Shapes: `tokens` (any integer type) and `supervised` [length].
    Raises: ValueError or TypeError if an argument does not fit, or if a supervised token is the
    mask token of an objective that never predicts it.
    """
    tokens, supervised = _checked(tokens, supervised, blocks)
    _check_scalars(mask_token_id, seed, sample_index)
    _check_mask_token(tokens, supervised, objective, mask_token_id)
    key = {"seed": seed, "sample_index": sample_index}
    t = noise_levels(blocks, objective, **key)[blocks.of_position]
    drawn = uniform(Stream.TOKEN, blocks.length, **key) < t
    eligible = supervised.copy()
    if objective.canvas is Canvas.SEED_AND_MASK:
        eligible[blocks.start] = False
    corrupted = np.stack([drawn, ~drawn][: objective.num_views]) & eligible
    shown: Any = mask_token_id
    if objective.canvas is Canvas.UNIFORM:
        shown = _random_tokens(blocks.length, vocab_size, **key)

    # Everything is decided for tokens first, then moved to the rows that predict them.
    shift = objective.label_shift
    learnable = eligible & ~_starts_document(blocks, shift > 0)
    is_uniform = objective.canvas is Canvas.UNIFORM
    target = learnable & (np.ones_like(corrupted) if is_uniform else corrupted)
    weight = np.where(target, _weights(target, t, blocks, objective.weight), 0.0)
    counted = _counted(target, learnable, blocks, objective.normalizer)
    next_labels = np.full(blocks.length, -1)
    if objective.learns_clean:
        has_next = _to_predicting_row(supervised & ~_starts_document(blocks, True), 1)
        next_labels = np.where(has_next, _to_predicting_row(tokens, 1), -1)
    return Corruption(
        tokens=np.where(corrupted, shown, tokens),
        labels=_to_predicting_row(np.where(target, tokens, 0), shift),
        weights=_to_predicting_row(weight, shift),
        counted=_to_predicting_row(counted, shift),
        bucket=_to_predicting_row(np.where(target, _buckets(t, objective), 0), shift),
        next_labels=next_labels,
        normalizer=int(counted.sum()),
        t=t,
    )


def noise_levels(
    blocks: BlockTable, objective: Objective, *, seed: int, sample_index: int
) -> NDArray[np.float64]:
    """Noise level t of each block in [t_min, t_max], float64 [num_blocks].

    Antithetic levels are t_k = frac(u + permutation[k] / num_blocks) before scaling: uniform each,
    and one in each of num_blocks equal strata, which lowers the variance of a sample's loss.
    """
    key = {"seed": seed, "sample_index": sample_index}
    if objective.t_sampling is TSampling.ANTITHETIC:
        order = np.argsort(_raw(Stream.STRATUM, blocks.num_blocks, **key), kind="stable")
        unit = (uniform(Stream.LEVEL, 1, **key) + order / blocks.num_blocks) % 1.0
    else:
        unit = uniform(Stream.LEVEL, blocks.length, **key)[blocks.start]
    return objective.t_min + (objective.t_max - objective.t_min) * unit


def uniform(stream: Stream, num: int, *, seed: int, sample_index: int) -> NDArray[np.float64]:
    """The first `num` draws of a stream, in [0, 1) with 53 random bits, float64 [num]."""
    raw = _raw(stream, num, seed=seed, sample_index=sample_index)
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _raw(stream: Stream, num: int, *, seed: int, sample_index: int) -> NDArray[np.uint64]:
    # NumPy's compatibility policy (NEP 19) freezes random_raw of a bit generator, but not what the
    # methods of Generator return. NumPy steps the counter before its first block: the "+ 1" above.
    key = np.array([seed, sample_index], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Philox(counter=counter, key=key).random_raw(num)


def _weights(
    target: NDArray[np.bool_], t: NDArray[np.float64], blocks: BlockTable, weight: Weight
) -> NDArray[np.float64] | float:
    """Weight of each token as a target, [num_views, length] or what broadcasts to it."""
    if weight is Weight.INVERSE_T:
        return 1.0 / t
    if weight is Weight.NONE:
        return 1.0
    block = blocks.of_position
    sizes = np.stack([np.bincount(block[view], minlength=blocks.num_blocks) for view in target])
    shares: NDArray[np.float64] = 1.0 / np.maximum(sizes, 1)[:, block]
    return shares


def _counted(
    target: NDArray[np.bool_],
    learnable: NDArray[np.bool_],
    blocks: BlockTable,
    normalizer: Normalizer,
) -> NDArray[np.bool_]:
    """Which tokens add one to the normalizer, bool [num_views, length]."""
    if normalizer is Normalizer.TARGETS:
        return target
    counted = np.zeros_like(target)
    if normalizer is Normalizer.SUPERVISED:
        counted[0] = learnable
        return counted
    for view, targets in enumerate(target):  # the first target of each block stands for the block
        positions = np.flatnonzero(targets)
        first = np.unique(blocks.of_position[positions], return_index=True)[1]
        counted[view, positions[first]] = True
    return counted


def _buckets(t: NDArray[np.float64], objective: Objective) -> NDArray[np.int64]:
    """Which quarter of [t_min, t_max] each level is in."""
    width = objective.t_max - objective.t_min
    unit = (t - objective.t_min) / width if width else np.zeros_like(t)
    return np.clip((unit * NUM_BUCKETS).astype(np.int64), 0, NUM_BUCKETS - 1)


def _random_tokens(
    length: int, vocab_size: int, *, seed: int, sample_index: int
) -> NDArray[np.int64]:
    if vocab_size < 1:
        raise ValueError(
            f"vocab_size={vocab_size} must be at least 1 for canvas=uniform, which shows random "
            "tokens; give the number of token ids."
        )
    unit = uniform(Stream.REPLACEMENT, length, seed=seed, sample_index=sample_index)
    return (unit * vocab_size).astype(np.int64)


def _starts_document(blocks: BlockTable, matters: bool) -> NDArray[np.bool_]:
    """Which tokens no row of their own document predicts, bool [length]; none without a shift."""
    starts = np.zeros(blocks.length, dtype=np.bool_)
    starts[blocks.document_start] = matters
    return starts


def _to_predicting_row[Kind: np.generic](values: NDArray[Kind], shift: int) -> NDArray[Kind]:
    """Moves a value from each token to the row that predicts it; rows without a token get 0."""
    if shift == 0:
        return values
    moved = np.zeros_like(values)
    moved[..., :-shift] = values[..., shift:]
    return moved


def _checked(
    tokens: NDArray[Any], supervised: NDArray[np.bool_], blocks: BlockTable
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    tokens, supervised = np.asarray(tokens), np.asarray(supervised)
    if tokens.dtype.kind not in "iu" or supervised.dtype != np.bool_:
        raise TypeError(
            f"tokens are {tokens.dtype} and supervised is {supervised.dtype}; tokens must be an "
            "integer array and supervised a bool array."
        )
    shape = (blocks.length,)
    if tokens.shape != shape or supervised.shape != shape:
        raise ValueError(
            f"tokens have shape {tokens.shape} and supervised {supervised.shape}; both must have "
            f"the shape {shape} of the block table: one sample at a time."
        )
    return tokens.astype(np.int64), supervised


def _check_mask_token(
    tokens: NDArray[np.int64],
    supervised: NDArray[np.bool_],
    objective: Objective,
    mask_token_id: int,
) -> None:
    wrong = supervised & (tokens == mask_token_id)
    if objective.exclude_mask_logit and wrong.any():
        raise ValueError(
            f"the token at position {int(np.flatnonzero(wrong)[0])} is mask_token_id="
            f"{mask_token_id} and supervised, but objective {objective.name!r} never predicts the "
            "mask token; mark the token as not supervised, or use a mask token that does not occur "
            "in the data."
        )


def _check_scalars(mask_token_id: int, seed: int, sample_index: int) -> None:
    if mask_token_id < 0:
        raise ValueError(
            f"mask_token_id={mask_token_id} must be a token id (0 or more); give the id that the "
            "tokenizer reserves for masking."
        )
    for name, value in (("seed", seed), ("sample_index", sample_index)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name}={value} must be in [0, 2**64); use for example {name}=1234.")
