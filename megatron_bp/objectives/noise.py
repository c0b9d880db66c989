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
from megatron_bp.objectives.objective import Normalizer, Objective, TSampling, Weight


class Stream(IntEnum):
    """Which of a sample's draws are for what; the numbers are frozen, they define the noise."""

    TOKEN = 0  # draw p: is the token at position p masked
    LEVEL = 1  # independent: draw p for the block that starts at p; antithetic: draw 0 alone
    STRATUM = 2  # antithetic: draws [0, num_blocks), whose order permutes the strata


@dataclass(frozen=True)
class Corruption:
    """The corrupted views of one sample with what each of their rows is to learn.

    A row is a target if its weight is positive; elsewhere its label is 0. The sample's loss is
    sum(weights * cross_entropy) / max(normalizer, 1). `counted` marks each row that adds one to the
    normalizer, so ranks that split the rows split the normalizer too. `t` is the noise level.

    Shapes: `tokens`, `labels` int64, `weights` float64, `counted` bool, all [num_views, length];
    `t` float64 [length].
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    weights: NDArray[np.float64]
    counted: NDArray[np.bool_]
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
) -> Corruption:
    """The corruption of one sample, the same wherever and whenever it is computed.

    View 0 masks a supervised token with the probability t of its block; view 1, if there is one,
    masks the other supervised tokens. Unsupervised tokens are never masked and never targets. With
    a label shift the first token of a document is never a target: the row before it is in another.

    Shapes: `tokens` (any integer type) and `supervised` [length].
    Raises: ValueError or TypeError if an argument does not fit, or if a supervised token is the
    mask token of an objective that never predicts it.
    """
    tokens, supervised = _checked(tokens, supervised, blocks)
    _check_scalars(mask_token_id, seed, sample_index)
    if objective.exclude_mask_logit and (supervised & (tokens == mask_token_id)).any():
        position = int(np.flatnonzero(supervised & (tokens == mask_token_id))[0])
        raise ValueError(
            f"the token at position {position} is mask_token_id={mask_token_id} and supervised, "
            f"but objective {objective.name!r} never predicts the mask token; mark the token as "
            "not supervised, or use a mask token that does not occur in the data."
        )
    t = noise_levels(blocks, objective, seed=seed, sample_index=sample_index)[blocks.of_position]
    drawn = uniform(Stream.TOKEN, blocks.length, seed=seed, sample_index=sample_index) < t
    views = np.stack([drawn, ~drawn][: objective.num_views])
    masked = views & supervised

    shift = objective.label_shift
    learnable = _to_predicting_row(supervised & ~_starts_document(blocks, shift), shift)
    target = _to_predicting_row(masked, shift) & learnable
    level = _to_predicting_row(t, shift)
    weight = 1.0 / np.where(target, level, 1.0) if objective.weight is Weight.INVERSE_T else 1.0
    if objective.normalizer is Normalizer.TARGETS:
        counted = target
    else:
        counted = np.zeros_like(target)
        counted[0] = learnable
    return Corruption(
        tokens=np.where(masked, mask_token_id, tokens),
        labels=np.where(target, _to_predicting_row(tokens, shift), 0),
        weights=np.where(target, weight, 0.0),
        counted=counted,
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


def _starts_document(blocks: BlockTable, shift: int) -> NDArray[np.bool_]:
    """Which tokens no row of their own document predicts, bool [length]."""
    starts = np.zeros(blocks.length, dtype=np.bool_)
    starts[blocks.document_start] = shift > 0
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


def _check_scalars(mask_token_id: int, seed: int, sample_index: int) -> None:
    if mask_token_id < 0:
        raise ValueError(
            f"mask_token_id={mask_token_id} must be a token id (0 or more); give the id that the "
            "tokenizer reserves for masking."
        )
    for name, value in (("seed", seed), ("sample_index", sample_index)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name}={value} must be in [0, 2**64); use for example {name}=1234.")
