"""A sample is corrupted by its index alone; documents, padding, short splits as said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron_bp.mcore.dataset import CorruptedDataset, CorruptionRules, refuse_short_splits
from megatron_bp.objectives.objective import make_objective

LENGTH, MASK, END = 24, 99, 98


def rules(name: str = "standard", **changes: Any) -> CorruptionRules:
    given: dict[str, Any] = {
        "objective": make_objective(name),
        "block_size": 4,
        "mask_token_id": MASK,
        "noise_seed": 3,
        "end_of_document": END,
        "split_documents": False,
        "end_is_target": True,
    }
    return CorruptionRules(**{**given, **changes})


class Clean:
    """A dataset of 5 samples in which token i of sample s is 10 * s + i % 10."""

    index_split = "train"

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
        tokens = 10 * (index or 0) + torch.arange(LENGTH) % 10
        tokens[7] = END
        mask = torch.ones(LENGTH)
        if index is None:
            mask[:] = 0
        if index == 4:
            mask[-5:] = 0  # the token after each of these is padding
        return {"tokens": tokens, "loss_mask": mask}


def test_a_sample_depends_on_seed_and_index_only() -> None:
    one, other = CorruptedDataset(Clean(), rules()), CorruptedDataset(Clean(), rules())
    other[3]
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name
    reseeded = CorruptedDataset(Clean(), rules(noise_seed=4))
    assert not torch.equal(one[1]["corrupted"], reseeded[1]["corrupted"])
    assert (one.split, len(one)) == ("train", 5)


@pytest.mark.parametrize(("name", "views"), [("standard", 1), ("fast_dllm_v2", 2)])
def test_shapes_and_streams(name: str, views: int) -> None:
    sample = CorruptedDataset(Clean(), rules(name))[2]
    for key in ("corrupted", "labels", "weights", "counted"):
        assert sample[key].shape == (views, LENGTH)
    masked = sample["corrupted"] == MASK
    assert torch.equal(sample["corrupted"][~masked], sample["clean"].expand(views, -1)[~masked])
    assert sample["normalizer"] == sample["counted"].sum()


def test_a_filling_sample_teaches_nothing() -> None:
    sample = CorruptedDataset(Clean(), rules())[None]
    assert sample["weights"].sum() == sample["normalizer"] == 0
    assert torch.equal(sample["corrupted"][0], sample["clean"])


def test_padding_is_never_a_target() -> None:
    # loss_mask is about the next token: zeros from position 19 on mean padding from 20 on
    sample = CorruptedDataset(Clean(), rules())[4]
    assert sample["counted"][0].tolist() == [True] * 20 + [False] * 4


def test_the_end_of_a_document_is_a_target_unless_masked() -> None:
    assert CorruptedDataset(Clean(), rules())[0]["counted"][0, 7]
    assert not CorruptedDataset(Clean(), rules(end_is_target=False))[0]["counted"][0, 7]


def test_a_token_that_is_the_mask_token_is_no_target() -> None:
    class WithMask(Clean):
        def __getitem__(self, index: int | None) -> dict[str, torch.Tensor]:
            sample = super().__getitem__(index)
            sample["tokens"][3] = MASK
            return sample

    sample = CorruptedDataset(WithMask(), rules())[0]
    assert not sample["counted"][0, 3]


def test_documents_end_with_their_end_token() -> None:
    tokens = np.array([1, END, END, 2, 3, END])
    assert rules(split_documents=True).documents(tokens) == ((0, 2), (2, 3), (3, 6))
    assert rules(split_documents=True).documents(tokens[:5]) == ((0, 2), (2, 3), (3, 5))
    assert rules().documents(tokens) == ((0, 6),)


def test_the_first_token_of_a_split_document_is_not_predicted_from_another() -> None:
    # with a label shift the first token of the second document is never predicted
    weights = CorruptedDataset(Clean(), rules("fast_dllm_v2", split_documents=True))[0]["weights"]
    assert weights[:, 7].sum() == 0
    weights = CorruptedDataset(Clean(), rules("fast_dllm_v2"))[0]["weights"]
    assert weights[:, 7].sum() == 1


class TokenCount:
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens


def test_a_split_shorter_than_one_sample_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_bp.mcore import dataset

    monkeypatch.setattr(dataset, "_tokens_of", lambda split: [("corpus", split.tokens)])
    splits = [TokenCount(100), TokenCount(20), TokenCount(3)]
    with pytest.raises(ValueError, match="2 problems") as error:
        refuse_short_splits(splits, (4, 4, 4), 24)
    text = str(error.value)
    assert (
        "the validation split of corpus has 20 tokens, fewer than one sample of --seq-length 24"
        in text
    )
    assert "use --seq-length 19 or less, more data, or a --split" in text
    refuse_short_splits(splits, (4, 0, 0), 24)  # nothing is read from the short ones
