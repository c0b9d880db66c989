"""Packed documents of the exactness check: the samples, and each document trained alone.

The reference never sees a pack: one forward pass a document, at positions from 0, without padding;
the sums over documents are the sample's. Used by exactness_reference.py and exactness_cases.py;
specified by tests/tools/test_check_exact.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_bp.data.packing import document_of_position, document_spans
from megatron_bp.layout.blocks import Spans, make_blocks
from megatron_bp.mcore.dataset import Sample
from megatron_bp.mcore.exactness_formulas import Parts, Seen
from megatron_bp.mcore.exactness_problem import MASK_ID, Problem, clean_packed, rules_of
from megatron_bp.objectives.noise import noise_levels

Logits = Callable[[Problem, Sample], Tensor]


def spans_of(problem: Problem) -> Spans:
    """Spans of the documents of a problem's samples, padding left out."""
    document = document_of_position(problem.documents, problem.length)
    return document_spans(document, problem.block_size)[: len(problem.documents)]


def documents_alone(
    problem: Problem, index: int, sample: Sample, log_probabilities: Logits
) -> Iterator[Seen]:
    """What a formula sees of each document of a sample that is trained by itself.

    `log_probabilities` [(1 + V) * length, vocabulary] are those of a problem of one document.
    """
    rules, clean = rules_of(problem), clean_packed(problem, index)
    whole = document_spans(clean["document"].numpy(), problem.block_size)
    blocks = make_blocks(problem.length, problem.block_size, whole)
    levels = noise_levels(blocks, rules.objective, seed=rules.noise_seed, sample_index=index)
    for lo, hi in spans_of(problem):
        length = hi - lo
        alone = replace(problem, length=length, documents=(), packed=False)
        part = {
            "clean": sample["clean"][lo:hi],
            "corrupted": sample["corrupted"][:, lo:hi],
            "document": torch.zeros(length, dtype=torch.int64),
        }
        scores = log_probabilities(alone, part).unflatten(0, (-1, length))
        yield Seen(
            tokens=part["clean"].tolist(),
            supervised=clean["supervised"][lo:hi].tolist(),
            document=[0] * length,
            block=[position // problem.block_size for position in range(length)],
            t=levels[blocks.of_position[lo:hi]].tolist(),
            masked=(part["corrupted"] == MASK_ID).tolist(),
            views=scores[1:],
            clean=scores[0],
        )


def add_parts(parts: Sequence[Parts]) -> Parts:
    """The sums and denominators of a sample from those of its documents."""
    return Parts(
        total=sum(part.total for part in parts),
        count=sum(part.count for part in parts),
        next_total=sum(part.next_total for part in parts),
        next_count=sum(part.next_count for part in parts),
    )
