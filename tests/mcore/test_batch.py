"""Layouts and batches: the ranks of a context group cut rows that together are the sample."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bp.attention.block_parallel import AttentionOptions
from megatron_bp.comm.groups import BlockGroups, LocalGroup
from megatron_bp.data.packing import PADDING
from megatron_bp.layout.plan import PlanRequest
from megatron_bp.mcore import batch as received
from megatron_bp.mcore.batch import CLEAN, Batch, LayoutSource
from megatron_bp.mcore.carrier import Layout, make_layout, make_params
from megatron_bp.objectives.objective import make_objective
from tests.mcore.test_dataset import Clean, CorruptedDataset, rules

LENGTH, Z = 24, 2
CASES = [(1, 1, 1), (2, 2, 1), (2, 1, 1), (4, 2, 1), (2, 2, 4), (4, 4, 8)]  # P, C, row multiple


class Ranks:
    """Stands in for a process group: a size and a rank."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def layout(
    rank: int, num_ranks: int, shards: int, multiple: int = 1, views: int = 1, **given: Any
) -> Layout:
    groups = BlockGroups(
        Ranks(num_ranks, rank),  # type: ignore[arg-type]
        Ranks(shards, rank % shards),  # type: ignore[arg-type]
        Ranks(num_ranks // shards, rank // shards),  # type: ignore[arg-type]
    )
    request = PlanRequest(
        given.pop("length", LENGTH), 4, num_ranks, shards, views, row_multiple=multiple, **given
    )
    options = AttentionOptions(softmax_scale=1.0)
    return make_layout(request, groups, options, True, torch.device("cpu"))


def stacked_samples(name: str = "standard", **changes: Any) -> dict[str, torch.Tensor]:
    """Two samples as a data loader stacks them."""
    dataset = CorruptedDataset(Clean(), rules(name, **changes))
    samples = [dataset[0], dataset[2]]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def batch(name: str = "standard", **changes: Any) -> Batch:
    stacked = stacked_samples(name, **changes)
    return Batch(
        document=stacked["document"],
        streams=torch.cat([stacked["clean"], stacked["corrupted"].flatten(1)], 1),
        labels=stacked["labels"].flatten(1),
        counted=stacked["counted"].flatten(1).long(),
        bucket=stacked["bucket"].flatten(1),
        next_labels=stacked["next_labels"],
        weights=stacked["weights"].flatten(1),
        normalizer=stacked["normalizer"].double(),
    )


@pytest.mark.parametrize("name", ["standard", "fast_dllm_v2"])
def test_a_rank_receives_what_the_data_loader_gives(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(received.dist, "get_rank", lambda: 3)
    alone = SimpleNamespace(size=lambda: 1)
    num_views = 2 if name == "fast_dllm_v2" else 1

    def receive(num_samples: int) -> Batch:
        samples = iter([stacked_samples(name)])
        shape, cpu = (num_samples, num_views, LENGTH), torch.device("cpu")
        return received.receive_batch(samples, shape, cpu, alone, source=3)  # type: ignore[arg-type]

    got, want = receive(Z), batch(name)
    for field in fields(Batch):
        mine, theirs = getattr(got, field.name), getattr(want, field.name)
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), field.name
    with pytest.raises(ValueError, match=rf"gave \[{Z}, \d+\] integers for .*which needs \[3, "):
        receive(3)


@pytest.mark.parametrize(("num_ranks", "shards", "multiple"), CASES)
@pytest.mark.parametrize("name", ["standard", "fast_dllm_v2"])
def test_every_target_is_on_exactly_one_rank(
    num_ranks: int, shards: int, multiple: int, name: str
) -> None:
    whole, views = batch(name), 2 if name == "fast_dllm_v2" else 1
    found, counted, rows = [], 0, 0
    for rank in range(num_ranks):
        mine = layout(rank, num_ranks, shards, multiple, views)
        targets = whole.targets(mine, make_objective(name, scope="global"))
        where = targets.is_target
        found += list(
            zip(targets.labels[where].tolist(), targets.weights[where].tolist(), strict=True)
        )
        counted += int(targets.num_counted)
        rows += int(targets.num_rows)
        assert (targets.weights >= 0).all()
    wanted = zip(
        whole.labels[whole.weights > 0].tolist(),
        whole.weights[whole.weights > 0].tolist(),
        strict=True,
    )
    assert sorted(found) == sorted(wanted)
    assert counted == int(whole.normalizer.sum())
    assert rows == Z * views * LENGTH


@pytest.mark.parametrize(("num_ranks", "shards", "multiple"), CASES)
def test_every_next_token_is_on_exactly_one_rank(
    num_ranks: int, shards: int, multiple: int
) -> None:
    """Also where several ranks hold the same clean rows: they share the targets out."""
    whole, objective = batch("nemotron_labs"), make_objective("nemotron_labs")
    found, most = [], 0
    for rank in range(num_ranks):
        mine = layout(rank, num_ranks, shards, multiple)
        targets = whole.targets(mine, objective)
        assert len(targets.is_target) == mine.plan.rows.num_rows
        is_next = targets.is_target & (targets.bucket == CLEAN)
        assert not is_next[mine.plan.rows.num_clean :].any()
        assert (targets.weights[is_next] == 1 / (LENGTH - 1)).all()
        found += targets.labels[is_next].tolist()
        most = max(most, int(is_next.sum()))
    assert sorted(found) == sorted(whole.next_labels[:, :-1].flatten().tolist())
    assert most <= Z * (LENGTH / num_ranks + 4)  # chunks are cut at blocks


def test_weights_are_those_of_the_sum_that_is_the_objective() -> None:
    whole, mine = batch("nemotron_labs"), layout(0, 1, 1)
    one, all_ = (
        whole.targets(mine, make_objective("nemotron_labs", scope=scope))
        for scope in ("example", "global")
    )
    is_next = all_.bucket == CLEAN
    assert torch.equal(one.is_target, all_.is_target)
    assert (all_.weights[is_next] == 1).all()
    wanted = 0.3 * whole.weights[:, mine.target_index].t()
    assert torch.allclose(all_.weights[LENGTH:], wanted, rtol=1e-15)
    assert torch.allclose(one.weights[LENGTH:], wanted / whole.normalizer, rtol=1e-15)


@pytest.mark.parametrize(("num_ranks", "shards", "multiple"), CASES)
def test_tokens_are_those_of_the_rows(num_ranks: int, shards: int, multiple: int) -> None:
    whole = batch()
    for rank in range(num_ranks):
        mine = layout(rank, num_ranks, shards, multiple)
        tokens, rows = whole.tokens(mine), mine.plan.rows
        assert tokens.shape == (Z, rows.num_rows)
        for row, (stream, position) in enumerate(zip(rows.stream, rows.position, strict=True)):
            if position < 0:
                assert (tokens[:, row] == 0).all()
            else:
                at = stream * LENGTH + position
                assert torch.equal(tokens[:, row], whole.streams[:, at])


def test_experts_count_each_clean_row_once() -> None:
    """Over the context group, clean rows and corrupted rows count once each."""
    for num_ranks, shards, multiple in CASES:
        layouts = [layout(rank, num_ranks, shards, multiple) for rank in range(num_ranks)]
        counts = sum(int((~mine.moe_ignores()).sum()) for mine in layouts)
        assert counts == 2 * LENGTH


def test_pruning_needs_corrupted_rows_that_deal_evenly() -> None:
    assert layout(0, 1, 1, multiple=4).prune
    uneven = layout(0, 2, 2, multiple=8, length=20)
    assert uneven.num_corrupted % 8
    assert not uneven.prune


def test_the_carrier_keeps_the_unpacked_path_of_attention() -> None:
    params = make_params(layout(0, 1, 1))
    assert params.qkv_format == "sbhd"
    assert params.cp_group is None
    assert params.max_seqlen_q == params.max_seqlen_kv == LENGTH


def test_packed_documents_get_their_own_layout() -> None:
    source = LayoutSource(layout(0, 1, 1), rules(split_documents=True))
    packed = source.of(batch(split_documents=True))
    assert packed.plan.request.documents == ((0, 8), (8, LENGTH))
    rows = packed.plan.rows
    assert packed.position.tolist() == (rows.position % 8 + (rows.position >= 16) * 8).tolist()
    common = LayoutSource(layout(0, 1, 1), rules())
    assert common.of(batch()) is common.common


def test_padding_gets_rows_up_to_a_multiple_only() -> None:
    """Indices still point into streams of the whole length."""
    whole = batch(split_documents=True)
    whole.document[:, 10:] = PADDING
    source = LayoutSource(layout(0, 1, 1, views=2), rules(split_documents=True), True, 6)
    short = source.of(whole)
    assert short.plan.request.documents == ((0, 8), (8, 10), (10, 12))
    real = short.plan.rows.position >= 0
    wanted = short.plan.rows.stream * LENGTH + short.plan.rows.position
    assert torch.equal(short.token_index[real], torch.from_numpy(wanted[real]))
    rows = short.plan.rows
    wanted = ((rows.stream - 1) * LENGTH + rows.position)[rows.num_clean :]
    assert short.target_index[: len(wanted)].tolist() == wanted.tolist()
    assert source.length_of(batch(split_documents=True)) == LENGTH
    whole.document[:] = PADDING
    assert source.length_of(whole) == 6, "a sample that only fills a batch has rows too"


def test_a_single_process_needs_no_group() -> None:
    assert BlockGroups.single().context == LocalGroup()
