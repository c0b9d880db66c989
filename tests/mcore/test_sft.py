"""Packed samples hold whole documents with their masks; splits, pooling and refusals as said."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_bp.data.packing import PADDING
from megatron_bp.mcore.dataset import CorruptedDataset
from megatron_bp.mcore.sft import Documents, PackedDataset, build_packed_datasets, split_bounds
from tests.mcore.test_dataset import rules

PAD, LENGTH, NUM = 98, 24, 20


def write(prefix: Path, seed: int = 1, with_mask: bool = True, mask_lengths: int = 0) -> str:
    """Documents of 2 to 20 tokens below 90; the first half of each is a prompt."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    drawn = np.random.Generator(np.random.Philox(key=seed))
    rows = [drawn.integers(0, 90, drawn.integers(2, 21)) for _ in range(NUM)]
    masks = [np.arange(len(row) + mask_lengths) >= len(row) // 2 for row in rows]
    kinds: list[tuple[str, list[Any], Any]] = [("", rows, np.uint16)]
    if with_mask:
        kinds.append(("_mask", masks, np.uint8))
    for kind, values, dtype in kinds:
        builder = IndexedDatasetBuilder(f"{prefix}{kind}.bin", dtype=dtype)
        for value in values:
            builder.add_document(torch.from_numpy(value.astype(np.int64)), [len(value)])
        builder.finalize(f"{prefix}{kind}.idx")
    return str(prefix)


def packed(prefixes: list[str], num_samples: int = 30, **changes: Any) -> PackedDataset:
    given = {"span": (0, NUM * len(prefixes)), "length": LENGTH, "seed": 3, "pad_id": PAD}
    return PackedDataset(Documents(prefixes), num_samples=num_samples, **{**given, **changes})


def test_a_sample_is_whole_documents_and_then_padding(tmp_path: Path) -> None:
    dataset = packed([write(tmp_path / "a")])
    seen = []
    for index, members in enumerate(dataset.samples):
        sample = {name: value.numpy() for name, value in dataset[index].items()}
        for place, member in enumerate(members):
            here = sample["document"] == place
            tokens, learnt = dataset.documents[member]
            np.testing.assert_array_equal(sample["tokens"][here], tokens)
            np.testing.assert_array_equal(sample["supervised"][here], learnt)
            assert 0 < learnt.sum() < max(len(learnt), 2)
        padding = sample["document"] == PADDING
        assert (sample["tokens"][padding] == PAD).all()
        assert not sample["supervised"][padding].any()
        seen += members
    epochs = len(seen) // NUM
    assert epochs > 1, "several epochs, or the next line shows little"
    assert sorted(seen) == sorted(list(range(NUM)) * epochs)
    assert len(dataset) >= 30
    first = len(packed([str(tmp_path / "a")], num_samples=1))
    assert dataset.samples[:first] != dataset.samples[first : 2 * first], "epochs are packed anew"


def test_a_split_reads_its_own_documents(tmp_path: Path) -> None:
    dataset = packed([write(tmp_path / "a")], span=(12, 15), num_samples=1)
    assert sorted(member for sample in dataset.samples for member in sample) == [0, 1, 2]
    for index, members in enumerate(dataset.samples):
        tokens = np.concatenate([dataset.documents[12 + member][0] for member in members])
        np.testing.assert_array_equal(dataset[index]["tokens"].numpy()[: len(tokens)], tokens)


def test_a_sample_does_not_depend_on_how_many_are_asked_for(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a")
    few, many = packed([prefix], num_samples=3), packed([prefix], num_samples=100)
    assert many.samples[: len(few)] == few.samples
    assert packed([prefix], seed=4).samples[:5] != few.samples[:5]


def test_prefixes_are_pooled_in_order(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a", 1), write(tmp_path / "b", 2, with_mask=False)
    pool = Documents([one, two])
    assert len(pool) == 2 * NUM
    for index in (0, NUM - 1):
        np.testing.assert_array_equal(pool[index][0], Documents([one])[index][0])
        tokens, learnt = pool[NUM + index]
        np.testing.assert_array_equal(tokens, Documents([two])[index][0])
        assert learnt.all(), "without a mask file everything is learnt"


@pytest.mark.parametrize("name", ["standard", "fast_dllm_v2"])
def test_prompts_and_padding_are_never_masked_and_never_targets(tmp_path: Path, name: str) -> None:
    clean = packed([write(tmp_path / "a")])
    shift = name == "fast_dllm_v2"
    noisy = CorruptedDataset(clean, rules(name, split_documents=True))
    num_targets = 0
    for index in range(len(clean)):
        supervised = clean[index]["supervised"]
        sample = noisy[index]
        masked = (sample["corrupted"] == 99).any(0)
        assert not (masked & ~supervised).any()
        target = torch.roll((sample["weights"] > 0).any(0), int(shift))
        assert not (target & ~supervised).any()
        num_targets += int(target.sum())
    assert num_targets > 50


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    clean = packed([write(tmp_path / "a")])
    with pytest.raises(ValueError, match=r"sample 0 holds token \d+, outside the vocabulary of 50"):
        CorruptedDataset(clean, rules(split_documents=True, vocab_size=50))[0]


def test_a_filling_sample_is_all_padding(tmp_path: Path) -> None:
    clean = packed([write(tmp_path / "a")])
    sample = CorruptedDataset(clean, rules(split_documents=True))[None]
    assert (sample["document"] == PADDING).all()
    assert sample["normalizer"] == sample["weights"].sum() == 0


def arguments(**changes: Any) -> argparse.Namespace:
    given: dict[str, Any] = {
        "mock_data": False,
        "split": "80,10,10",
        "seq_length": LENGTH,
        "seed": 1,
        "data_path": None,
        "data_args_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "per_split_data_args_path": None,
    }
    return argparse.Namespace(**{**given, **changes})


class Tokenizer:
    eod = PAD


def build(args: argparse.Namespace, here: bool = True) -> list[Any]:
    return build_packed_datasets(args, Tokenizer(), (8, 2, 2), lambda: here)


def test_documents_are_split_in_order(tmp_path: Path) -> None:
    assert split_bounds("80,10,10", 20) == [(0, 16), (16, 18), (18, 20)]
    train, valid, test = build(arguments(data_path=[write(tmp_path / "a")]))
    assert (train.span, valid.span, test.span) == ((0, 16), (16, 18), (18, 20))
    assert build(arguments(data_path=[str(tmp_path / "a")]), here=False) == [None] * 3
    assert build(arguments(data_path=[str(tmp_path / "a")], split="80,20,0"))[2] is None


def test_each_split_may_have_prefixes_of_its_own(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a"), write(tmp_path / "b", 2)
    args = arguments(train_data_path=[one, two], valid_data_path=[two])
    train, valid, test = build(args)
    assert (train.span, valid.span, test) == ((0, 2 * NUM), (0, NUM), None)


def test_mistakes_are_named(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "a"), write(tmp_path / "b", mask_lengths=1)
    for given, message in (
        ({"data_path": [str(tmp_path / "none")]}, "is missing; run tools/preprocess.py"),
        ({"data_path": ["1", good, "2", good]}, "weights .* are not supported"),
        ({"data_path": [bad]}, "does not have the documents of"),
        (
            {"data_path": [good], "split": "99,1,0"},
            "the validation split .* is empty; give it a la",
        ),
        ({"data_path": [good], "mock_data": True}, "drop --mock-data"),
        ({"data_path": [good], "multiple_validation_sets": True}, "drop --multiple-validation"),
    ):
        with pytest.raises(ValueError, match=message):
            build(arguments(**given))
    with pytest.raises(ValueError, match="--max-length 8 and an --overflow rule"):
        len(packed([good], length=8))
