"""Datasets of whole documents packed into samples, with a mask of the tokens to learn.

Reads PREFIX.{bin,idx} and, where it exists, PREFIX_mask.{bin,idx} with the same documents, as
tools/preprocess.py writes them. A sample is a pure function of seed and index. Knows no noise and
no process group. Specified by tests/mcore/test_sft.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.utils import get_blend_and_blend_per_split
from numpy.typing import NDArray
from torch import Tensor

from megatron_bp.config import list_problems
from megatron_bp.data.packing import document_of_position, pack_epoch

SPLITS = ("train", "validation", "test")


class Documents:
    """The documents of some prefixes, one after another; tokens are read when asked for."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        if not prefixes:
            raise ValueError("no data: give --data-path PREFIX, as tools/preprocess.py wrote it.")
        self.parts = [_Part.open(prefix) for prefix in prefixes]
        self.first = np.cumsum([0] + [len(part.tokens) for part in self.parts])
        self.lengths = np.concatenate([part.tokens.sequence_lengths for part in self.parts])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens of a document, and which of them are to be learnt."""
        at = int(np.searchsorted(self.first, index, side="right")) - 1
        part, inside = self.parts[at], index - int(self.first[at])
        tokens = part.tokens[inside].astype(np.int64)
        if part.mask is None:
            return tokens, np.ones(len(tokens), dtype=np.bool_)
        return tokens, part.mask[inside].astype(np.bool_)


@dataclass(frozen=True)
class _Part:
    """The documents of one prefix; without a mask file all tokens are to be learnt."""

    tokens: Any
    mask: Any

    @classmethod
    def open(cls, prefix: str) -> _Part:
        if not IndexedDataset.exists(prefix):
            raise ValueError(f"{prefix}.bin or {prefix}.idx is missing; run tools/preprocess.py.")
        tokens = IndexedDataset(prefix)
        if len(tokens.document_indices) != len(tokens) + 1:
            raise ValueError(
                f"{prefix} has {len(tokens)} sequences in {len(tokens.document_indices) - 1} "
                "documents; each document must be one sequence, as tools/preprocess.py writes them."
            )
        name = f"{prefix}_mask"
        if not Path(f"{name}.idx").exists():
            return cls(tokens, None)
        mask = IndexedDataset(name)
        if not np.array_equal(mask.sequence_lengths, tokens.sequence_lengths):
            raise ValueError(
                f"{name} does not have the documents of {prefix}; run tools/preprocess.py again."
            )
        return cls(tokens, mask)


class PackedDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples of `length` tokens, each made of whole documents of [lo, hi).

    Shapes of an item: `tokens`, `document` int64 [length] (see data/packing.py) and `supervised`
    bool [length]. Item None is all padding. There are `num_samples` or more: whole epochs, at
    least one, each packed anew.
    """

    def __init__(
        self,
        documents: Documents,
        span: tuple[int, int],
        length: int,
        num_samples: int,
        seed: int,
        pad_id: int,
    ) -> None:
        self.documents, self.span, self.length, self.pad_id = documents, span, length, pad_id
        self.num_samples, self.seed = num_samples, seed
        self.split = "unknown"

    @cached_property
    def samples(self) -> list[tuple[int, ...]]:
        """Documents of each sample, counted from the start of the span."""
        lo, hi = self.span
        packed: list[tuple[int, ...]] = []
        for epoch in self._epochs():
            packed += pack_epoch(self.documents.lengths[lo:hi], self.length, self.seed, epoch)
            if len(packed) >= self.num_samples:
                break
        return packed

    def _epochs(self) -> Iterator[int]:
        yield from range(max(self.num_samples, 1))

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | None) -> dict[str, Tensor]:
        members = () if index is None else self.samples[index]
        parts = [self.documents[self.span[0] + member] for member in members]
        tokens = np.full(self.length, self.pad_id, dtype=np.int64)
        supervised = np.zeros(self.length, dtype=np.bool_)
        lengths = [len(part) for part, _ in parts]
        if parts:
            tokens[: sum(lengths)] = np.concatenate([part for part, _ in parts])
            supervised[: sum(lengths)] = np.concatenate([mask for _, mask in parts])
        return {
            "tokens": torch.from_numpy(tokens),
            "supervised": torch.from_numpy(supervised),
            "document": torch.from_numpy(document_of_position(lengths, self.length)),
        }


def build_packed_datasets(
    args: argparse.Namespace,
    tokenizer: Any,
    num_samples: Sequence[int | None],
    is_built_here: Callable[[], bool],
) -> list[Any]:
    """Returns the train, validation and test dataset, or None for one that is not read here.

    Several prefixes are pooled. Documents are split by --split in their order, as Megatron does.
    Raises: ValueError for data that is missing, weighted, or too little for a split.
    """
    if not is_built_here():
        return [None] * len(SPLITS)
    if args.mock_data:
        raise ValueError("--bdlm-data sft packs documents of files; drop --mock-data.")
    if getattr(args, "multiple_validation_sets", False):
        raise ValueError("--bdlm-data sft has one validation set; drop --multiple-validation-sets.")
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    datasets: list[Any] = []
    problems = []
    whole = Documents(_prefixes(blend)) if blend else None
    for index, (name, wanted) in enumerate(zip(SPLITS, num_samples, strict=True)):
        shares = parse_and_normalize_split(args.split)
        is_given = shares[index] > 0 if whole else bool((blend_per_split or [None] * 3)[index])
        if wanted == 0 or not is_given:
            datasets.append(None)
            continue
        documents = whole or Documents(_prefixes(blend_per_split[index]))
        bounds = split_bounds(args.split, len(documents)) if whole else [(0, len(documents))] * 3
        lo, hi = bounds[index]
        if lo == hi:
            problems.append(
                f"the {name} split (--split {args.split}) of {len(documents)} documents is empty; "
                "give it a larger share, or none (0)"
            )
            continue
        datasets.append(
            PackedDataset(
                documents, (lo, hi), args.seq_length, wanted or 0, args.seed, int(tokenizer.eod)
            )
        )
        datasets[-1].split = name
    if problems:
        raise ValueError(list_problems(problems))
    return datasets


def split_bounds(split: str, num_documents: int) -> list[tuple[int, int]]:
    """First and one past the last document of each split."""
    shares = np.cumsum([0.0, *parse_and_normalize_split(split)])
    edges = [round(share * num_documents) for share in shares]
    return list(pairwise(edges))


def _prefixes(blend: Any) -> list[str]:
    prefixes, weights = blend
    if weights is not None:
        raise ValueError(
            f"--bdlm-data sft pools the documents of {list(prefixes)}; weights ({list(weights)}) "
            "are not supported: give prefixes only, or repeat a prefix."
        )
    return list(prefixes)
