"""Builds Megatron's own GPT datasets and, for a diffusion objective, corrupts their samples.

A sample keeps its index in Megatron's dataset, and noise is drawn from (seed, index), so every
rank of a context group, every tensor-parallel rank and every pipeline stage that reads the sample
has the same noise. Knows no process group. Specified by tests/mcore/test_dataset.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from megatron_bp.config import list_problems
from megatron_bp.data.packing import document_spans
from megatron_bp.layout.blocks import Spans, make_blocks
from megatron_bp.mcore.sft import build_packed_datasets
from megatron_bp.objectives.noise import corrupt
from megatron_bp.objectives.objective import Objective

Sample = dict[str, Tensor]


@dataclass(frozen=True)
class CorruptionRules:
    """What turns a clean sample into a corrupted one.

    `end_of_document` is the token id that ends a document. `split_documents` keeps documents of one
    sample apart (--reset-attention-mask); `end_is_target` is false under --eod-mask-loss.
    `vocab_size` bounds tokens and the random tokens of a uniform canvas; 0 checks nothing.
    """

    objective: Objective
    block_size: int
    mask_token_id: int
    noise_seed: int
    end_of_document: int
    split_documents: bool
    end_is_target: bool
    vocab_size: int = 0

    def documents(self, tokens: np.ndarray) -> Spans:
        """Returns the spans of a sample's documents; each ends with its end token."""
        if not self.split_documents:
            return ((0, len(tokens)),)
        stops = np.flatnonzero(tokens == self.end_of_document) + 1
        bounds = np.unique(np.concatenate([[0], stops, [len(tokens)]]))
        return tuple((int(lo), int(hi)) for lo, hi in pairwise(bounds))

    def sample(self, clean: Sample, index: int, is_padding: bool) -> Sample:
        """Returns the corrupted sample of one item of a GPT dataset or of a packed one.

        Shapes: clean, document, next_labels [L]; corrupted, labels, weights, counted, bucket
        [V, L]; normalizer [].
        Raises: ValueError for a token outside the vocabulary.
        """
        tokens = clean["tokens"].numpy()
        if 0 < self.vocab_size <= tokens.max(initial=0):
            raise ValueError(
                f"sample {index} holds token {tokens.max()}, outside the vocabulary of "
                f"{self.vocab_size} ids; prepare the data with the tokenizer of this run."
            )
        document = self.document_of_position(clean)
        corruption = corrupt(
            tokens,
            self.supervised(clean, is_padding),
            make_blocks(len(tokens), self.block_size, document_spans(document, self.block_size)),
            self.objective,
            mask_token_id=self.mask_token_id,
            seed=self.noise_seed,
            sample_index=index,
            vocab_size=self.vocab_size,
        )
        return {
            "clean": clean["tokens"],
            "document": torch.from_numpy(document),
            "corrupted": torch.from_numpy(corruption.tokens),
            "labels": torch.from_numpy(corruption.labels),
            "weights": torch.from_numpy(corruption.weights),
            "counted": torch.from_numpy(corruption.counted),
            "bucket": torch.from_numpy(corruption.bucket),
            "next_labels": torch.from_numpy(corruption.next_labels),
            "normalizer": torch.tensor(corruption.normalizer),
        }

    def document_of_position(self, clean: Sample) -> np.ndarray:
        """Returns the document of each position [L], as data/packing.py numbers them."""
        if "document" in clean:
            return clean["document"].numpy()
        spans = self.documents(clean["tokens"].numpy())
        return np.repeat(np.arange(len(spans)), [hi - lo for lo, hi in spans])

    def supervised(self, clean: Sample, is_padding: bool) -> np.ndarray:
        """Returns which tokens of an item are to be learnt, bool [L]."""
        tokens = clean["tokens"].numpy()
        if "supervised" in clean:
            supervised = clean["supervised"].numpy() & (not is_padding)
        else:
            # Megatron's mask is about the *next* token: it is 0 at i where token i + 1 is padding.
            # The first token, which it says nothing of, goes with the second.
            loss_mask = clean["loss_mask"].numpy()
            supervised = np.concatenate([loss_mask[:1] > 0, loss_mask[:-1] > 0]) & (not is_padding)
        supervised &= tokens != self.mask_token_id
        if not self.end_is_target:
            supervised &= tokens != self.end_of_document
        return supervised


class CorruptedDataset(torch.utils.data.Dataset[Sample]):
    """A GPT dataset whose item `index` is `rules.sample` of the clean item `index`."""

    def __init__(self, clean: Any, rules: CorruptionRules) -> None:
        self.clean, self.rules = clean, rules
        # Megatron's loader asks for the split by one of these names.
        self.split = getattr(clean, "split", getattr(clean, "index_split", "unknown"))

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, index: Any) -> Sample:
        if index is None:  # Megatron's request for a sample that only fills a batch
            return self.rules.sample(self.clean[None], 0, is_padding=True)
        return self.rules.sample(self.clean[index], int(index), is_padding=False)


def build_datasets(
    args: argparse.Namespace,
    tokenizer: Any,
    num_samples: Sequence[int | None],
    is_built_here: Callable[[], bool],
) -> list[Any]:
    """Returns Megatron's train, validation and test dataset (or None each), as stock pretraining
    does.

    Raises: ValueError for data modes that are not built here.
    """
    if args.sft or getattr(args, "fim_data", False):
        raise ValueError(
            "--sft and --fim-data are not built by this script; drop them, or use Megatron's own "
            "pretraining script"
        )
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
    )
    kind = MockGPTDataset if args.mock_data else GPTDataset
    datasets = BlendedMegatronDatasetBuilder(kind, num_samples, is_built_here, config).build()
    return list(datasets)


def build_corrupted_datasets(
    args: argparse.Namespace,
    tokenizer: Any,
    num_samples: Sequence[int | None],
    is_built_here: Callable[[], bool],
    rules: CorruptionRules,
) -> list[Any]:
    """Returns the datasets of `build_datasets` with their samples corrupted.

    Raises: ValueError if a split that will be read has fewer tokens than one sample.
    """
    # The end-of-document token is ours to treat, and no dense mask is wanted.
    clean_args = argparse.Namespace(**vars(args))
    clean_args.eod_mask_loss = clean_args.reset_attention_mask = False
    clean_args.create_attention_mask_in_dataloader = False
    if args.bdlm_data == "sft":
        datasets = build_packed_datasets(args, tokenizer, num_samples, is_built_here)
    else:
        datasets = build_datasets(clean_args, tokenizer, num_samples, is_built_here)
        refuse_short_splits(datasets, num_samples, args.seq_length)
    return [
        [CorruptedDataset(part, rules) for part in dataset]
        if isinstance(dataset, list)
        else dataset and CorruptedDataset(dataset, rules)
        for dataset in datasets
    ]


def refuse_short_splits(
    datasets: Sequence[Any], num_samples: Sequence[int | None], length: int
) -> None:
    """Returns if every split that will be read holds at least one sample of `length` + 1 tokens.

    Megatron repeats the few tokens of a shorter one until they fill a sample.
    Raises: ValueError that lists every short split.
    """
    problems = [
        f"the {split} split of {path} has {tokens} tokens, fewer than one sample of --seq-length "
        f"{length} "
        f"(+ 1); use --seq-length {max(tokens - 1, 1)} or less, more data, or a --split that gives "
        "it more"
        for split, dataset, wanted in zip(
            ("train", "validation", "test"), datasets, num_samples, strict=True
        )
        for path, tokens in (_tokens_of(dataset) if wanted != 0 else ())
        if tokens < length + 1
    ]
    if problems:
        raise ValueError(list_problems(problems))


def _tokens_of(dataset: Any) -> list[tuple[str, int]]:
    """Path and tokens of one epoch of each file behind a dataset."""
    if isinstance(dataset, list):
        return [found for part in dataset for found in _tokens_of(part)]
    if isinstance(dataset, GPTDataset) and not isinstance(dataset, MockGPTDataset):
        return [(str(dataset.dataset_path), int(dataset._get_num_tokens_per_epoch()))]
    return [found for part in getattr(dataset, "datasets", []) for found in _tokens_of(part)]
