"""The packed documents of the exactness check are the kinds that it is to cover."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_bp.data.packing import document_spans
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.mcore.exactness_cases import DOCUMENTS, OTHERS, cases
from megatron_bp.mcore.exactness_packed import spans_of
from megatron_bp.mcore.exactness_problem import clean_packed, samples_of


def test_documents_are_short_one_block_and_on_all_ranks() -> None:
    lengths, block = DOCUMENTS.documents, DOCUMENTS.block_size
    assert any(length < block for length in lengths)
    assert block in lengths
    assert 1 in lengths
    assert sum(lengths) < DOCUMENTS.length, "there is padding"
    document = clean_packed(DOCUMENTS, 0)["document"].numpy()
    spans = document_spans(document, block)
    longest = lengths.index(max(lengths))
    for num_ranks in (2, 4):
        request = PlanRequest(DOCUMENTS.length, block, num_ranks, num_ranks, documents=spans)
        for rank in range(num_ranks):
            rows = make_plan(request, rank).rows
            assert (rows.document == longest).any()
            assert (rows.document[rows.stream == 1] == longest).any()
    assert spans_of(DOCUMENTS) == spans[: len(lengths)]


def test_every_kind_of_layout_trains_them() -> None:
    found = cases(["documents2", "documents4"], torch.float64)
    layouts = {layout for _, _, layout in found}
    assert {(x.context, x.block) for x in layouts} == {
        (2, 2), (4, 4), (1, 2), (1, 4), (2, 4), (2, 1)
    }  # fmt: skip
    for axis, value in (("tensor", 2), ("pipeline", 2), ("data", 2), ("recompute", "full")):
        assert any(getattr(layout, axis) == value for layout in layouts), axis
    assert any(layout.sequence_parallel for layout in layouts)
    assert len(found) == len(OTHERS["documents2"]) + len(OTHERS["documents4"]) == 55


@pytest.mark.parametrize("objective", ["standard", "fast_dllm_v2"])
def test_prompts_and_padding_are_not_corrupted(objective: str) -> None:
    problem = replace(DOCUMENTS, objective=objective)
    for index, sample in enumerate(samples_of(problem)):
        supervised = clean_packed(problem, index)["supervised"]
        changed = sample["corrupted"] != sample["clean"]
        assert changed.any()
        assert not (changed & ~supervised).any()
