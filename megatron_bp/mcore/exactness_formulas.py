"""Each objective's loss written out from its published formula, one token at a time.

The oracle of the exactness check and of tests/mcore/test_presets.py. It shares the noise (what was
corrupted, at which level) with the production path, and nothing of labels, weights, counts or
scopes. Knows no rank.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Seen:
    """One sample as a formula sees it.

    `tokens`, `supervised`, `document`, `block`, `t` are per position; `masked` per view and
    position. `views` [V, L, vocabulary] and `clean` [L, vocabulary] are log-probabilities.
    """

    tokens: list[int]
    supervised: list[bool]
    document: list[int]
    block: list[int]
    t: list[float]
    masked: list[list[bool]]
    views: Tensor
    clean: Tensor

    def next_pairs(self) -> Iterator[tuple[int, int]]:
        """Neighbours (row, token after it) of one document."""
        for row in range(len(self.tokens) - 1):
            if self.document[row] == self.document[row + 1]:
                yield row, row + 1

    def loss(self, log_probabilities: Tensor, row: int, position: int) -> Tensor:
        """Cross-entropy of the token at `position`, predicted by a row."""
        return -log_probabilities[row, self.tokens[position]]


@dataclass(frozen=True, eq=False)
class Parts:
    """A sample's weighted sum over corrupted rows and over clean rows, with their denominators."""

    total: Any
    count: int
    next_total: Any = 0.0
    next_count: int = 0


def inverse_t(seen: Seen) -> Parts:
    """sum over masked i of CE_i / t_i, over supervised tokens (BD3-LM eq. 8, SDAR)."""
    terms = [seen.loss(seen.views[0], i, i) / seen.t[i] for i, m in enumerate(seen.masked[0]) if m]
    return Parts(sum(terms), sum(seen.supervised))


def masked_mean(seen: Seen) -> Parts:
    """The mean of CE_i over masked i (dFactory)."""
    terms = [seen.loss(seen.views[0], i, i) for i, m in enumerate(seen.masked[0]) if m]
    return Parts(sum(terms), len(terms))


def shifted_pair(seen: Seen) -> Parts:
    """The mean over both views of the CE with which row i predicts a masked token i + 1."""
    terms = [
        seen.loss(seen.views[view], i, j)
        for view in (0, 1)
        for i, j in seen.next_pairs()
        if seen.masked[view][j]
    ]
    return Parts(sum(terms), len(terms))


def joint(seen: Seen) -> Parts:
    """0.3 * CE / p over supervised tokens + 1.0 * the mean next-token CE (Nemotron-Labs)."""
    diffusion = inverse_t(seen)
    return Parts(0.3 * diffusion.total, diffusion.count, *_next_tokens(seen))


def flat_blocks(seen: Seen) -> Parts:
    """The mean over blocks of the mean CE of all their tokens + next-token CE (DiffusionGemma)."""
    means = []
    for block in dict.fromkeys(seen.block):
        terms = [
            seen.loss(seen.views[0], i, i)
            for i, own in enumerate(seen.block)
            if own == block and seen.supervised[i]
        ]
        if terms:
            means.append(sum(terms) / len(terms))
    return Parts(sum(means), len(means), *_next_tokens(seen))


def _next_tokens(seen: Seen) -> tuple[Any, int]:
    terms = [seen.loss(seen.clean, i, j) for i, j in seen.next_pairs() if seen.supervised[j]]
    return sum(terms), len(terms)


@dataclass(frozen=True)
class Formula:
    """A formula, the preset with the choices that should compute it, and its softmax."""

    parts: Callable[[Seen], Parts]
    preset: str
    choices: tuple[tuple[str, Any], ...] = ()
    never_predicts_mask: bool = False


FORMULAS = {
    "standard": Formula(inverse_t, "standard", never_predicts_mask=True),
    "bd3lm": Formula(inverse_t, "bd3lm", never_predicts_mask=True),
    "sdar": Formula(inverse_t, "sdar"),
    "llada2": Formula(masked_mean, "llada2"),
    "fast_dllm_v2": Formula(shifted_pair, "fast_dllm_v2"),
    "nemotron_labs": Formula(joint, "nemotron_labs"),
    # Not presets: the canvases and weights that no preset uses. A seed is never masked, so the
    # formula of its preset holds.
    "seeds": Formula(shifted_pair, "fast_dllm_v2", (("canvas", "seed_and_mask"),)),
    "flat_blocks": Formula(
        flat_blocks,
        "llada2",
        (
            ("canvas", "uniform"),
            ("weight", "block_mean"),
            ("normalizer", "blocks"),
            ("clean_rule", "token_causal"),
            ("ar_loss_weight", 1.0),
        ),
    ),
}


def batch_loss(samples: list[Parts], one_denominator: bool) -> Tensor:
    """The loss of a batch: the mean over samples, or all sums over the count of all samples."""
    if one_denominator:
        total = sum(parts.total + parts.next_total for parts in samples)
        return torch.as_tensor(total / max(sum(parts.count for parts in samples), 1))
    losses = [
        parts.total / max(parts.count, 1) + parts.next_total / max(parts.next_count, 1)
        for parts in samples
    ]
    return torch.as_tensor(sum(losses) / len(losses))
