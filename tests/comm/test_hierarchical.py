"""Exchanges over groups that span nodes bring the same bits, and each byte crosses once per node.

Only a group can show this: 4 and 8 gloo ranks play 2 nodes of 2, 2 of 4 and 4 of 2 ranks.
"""

from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron_bp.attention.block_parallel import AttentionOptions, block_parallel_attention
from megatron_bp.comm.clean_kv import CleanGather, CleanReduce
from megatron_bp.comm.groups import BlockGroups, BlockingGroup, Group, LocalGroup, NodeGroup
from megatron_bp.comm.hierarchical import refuse_bound_device, split_by_node
from megatron_bp.layout.decomposition import Phase
from megatron_bp.layout.exchange import LinkRows, Route, SlabExchange
from megatron_bp.layout.owners import Ownership
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.attention.test_block_parallel import make_groups
from tests.comm.counting import counted
from tests.comm.test_clean_kv import DOCUMENTS, copies_summed, position_errors, random
from tests.distributed import run_distributed

WORLDS = {4: (2,), 8: (4, 2)}  # ranks: ranks of a node
KV_HEADS, SIZE, SAMPLES = 2, 4, 2


def cases(num_ranks: int) -> list[PlanRequest]:
    """In place and by copies, ragged, packed, contiguous, windowed, the baseline and a hybrid."""
    aligned = PlanRequest(
        length=num_ranks * 8, block_size=4, num_ranks=num_ranks, num_clean_shards=num_ranks
    )
    found = [
        aligned,
        replace(aligned, length=num_ranks * 8 - 5),
        replace(aligned, length=48, documents=DOCUMENTS),
        replace(aligned, ownership=Ownership.CONTIGUOUS, num_views=2),
        replace(aligned, window=9),
        replace(aligned, gather_corrupted=True, num_views=2),
    ]
    return found + [replace(aligned, num_clean_shards=4)] * (num_ranks == 8)


@dataclass(frozen=True)
class Found:
    """What one rank saw of one request on nodes of `per_node` ranks."""

    request: PlanRequest
    per_node: int
    kinds: tuple[str, str]
    wrong: list[str]
    copies: bool
    gathered_bits: bool
    summed_bits: bool
    layer_error: tuple[float, ...]
    repeated: bool
    rows: tuple[LinkRows, LinkRows]
    expected: tuple[LinkRows, LinkRows]


def by_node(groups: BlockGroups, per_node: int) -> BlockGroups:
    """The same ranks, on nodes of `per_node` of them."""
    made: dict[int, Group] = {}
    for group in (groups.clean_shards, groups.context):
        ranks = dist.get_process_group_ranks(cast(dist.ProcessGroup, group))
        made[id(group)] = split_by_node(group, [rank // per_node for rank in ranks])
    return BlockGroups(
        made[id(groups.context)], made[id(groups.clean_shards)], groups.clean_replicas
    )


def exchanged(
    request: PlanRequest, groups: BlockGroups, seed: int, whole_numbers: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gathered buffer of random rows, and the reduction of random gradients."""
    plan = make_plan(request, groups.rank)
    clean, shape = plan.rows.num_clean, (SAMPLES, KV_HEADS, SIZE)
    k, v = (random((clean, *shape), seed + x + groups.rank).float() for x in (0, 100))
    gather = CleanGather(k, v, plan.exchange, groups.clean_shards)
    gather.wait(Phase.LATE)
    grad = random((plan.exchange.num_buffer_rows, SAMPLES, 2, KV_HEADS, SIZE), seed + groups.rank)
    reduce = CleanReduce(gather.buffer_SZ2MH, plan.exchange, groups.clean_shards, torch.float32)
    reduce.grad_SZ2MH.copy_((grad * 64).round() if whole_numbers else grad)
    reduce.start()
    return gather.buffer_SZ2MH, torch.stack(reduce.finish(clean))


def layer(request: PlanRequest, groups: BlockGroups, own_last: bool = True) -> list[torch.Tensor]:
    """Output and gradients of one layer in fp64."""
    plan = make_plan(request, groups.rank)
    rows = plan.rows.num_rows
    q = random((rows, SAMPLES, 2 * KV_HEADS, SIZE), groups.rank).requires_grad_()
    k, v = (
        random((rows, SAMPLES, KV_HEADS, SIZE), s + groups.rank).requires_grad_() for s in (9, 19)
    )
    options = AttentionOptions(SIZE**-0.5, kernel="dense", own_last=own_last)
    out = block_parallel_attention(q, k, v, plan, groups, options)
    (out * random(tuple(out.shape), 29)).sum().backward()
    return [out.detach(), *(cast(torch.Tensor, x.grad) for x in (q, k, v))]


def link_rows(request: PlanRequest, groups: BlockGroups, per_node: int) -> tuple[LinkRows, ...]:
    """Rows that were sent by a gather and by a reduction, inside and between nodes."""
    plan = make_plan(request, groups.rank)
    k = torch.zeros(plan.rows.num_clean, 1, 1, 1)
    with counted(per_node) as sent:
        CleanGather(k, k, plan.exchange, groups.clean_shards).wait(Phase.LATE)
    forward = list(sent)
    with counted(per_node) as sent:
        like = torch.zeros(1, 1, 2, 1, 1)
        reduce = CleanReduce(like, plan.exchange, groups.clean_shards, torch.float32)
        reduce.start()
        reduce.finish(len(k))
    row_bytes = 2 * 4
    return tuple(
        LinkRows(
            sum(x.inside for x in part) // row_bytes, sum(x.between for x in part) // row_bytes
        )
        for part in (forward, sent)
    )


def expected_rows(request: PlanRequest, rank: int, per_node: int) -> tuple[LinkRows, LinkRows]:
    """What the formulas say about `link_rows`."""
    exchange = make_plan(request, rank).exchange
    if isinstance(exchange, SlabExchange):
        rows = exchange.link_rows(min(per_node, exchange.num_shards), Route.BY_NODE)
        return rows, rows
    counts = exchange.send_counts, exchange.receive_counts
    return exchange.link_rows(per_node, counts[0]), exchange.link_rows(per_node, counts[1])


def _worker(rank: int, num_ranks: int) -> dict[str, Any]:
    answers: dict[str, Any] = {"found": _compare(rank, num_ranks)}
    if num_ranks == 4:
        answers |= {"fixed_order": _fixed_order(rank), "blocking": _blocking(rank)}
    return answers


def _compare(rank: int, num_ranks: int) -> list[Found]:
    flat = {request.num_clean_shards: None for request in cases(num_ranks)}
    groups = {shards: make_groups(num_ranks, shards) for shards in flat}
    found = []
    for per_node in WORLDS[num_ranks]:
        nodes = {shards: by_node(groups[shards], per_node) for shards in flat}
        for request in cases(num_ranks):
            one, two = groups[request.num_clean_shards], nodes[request.num_clean_shards]
            flat_layer, node_layer = layer(request, one), layer(request, two)
            summed = [exchanged(request, x, 1, True) for x in (one, two)]
            twice = [exchanged(request, two, 2, False)[1] for _ in range(2)]
            rows = link_rows(request, two, per_node)
            found.append(
                Found(
                    request,
                    per_node,
                    (type(two.clean_shards).__name__, type(two.context).__name__),
                    position_errors(request, rank, two),
                    copies_summed(request, rank, two),
                    summed[0][0].equal(summed[1][0]),
                    summed[0][1].equal(summed[1][1]),
                    tuple(
                        float((a - b).abs().max() / b.abs().max())
                        for a, b in zip(node_layer, flat_layer, strict=True)
                    ),
                    twice[0].equal(twice[1]),
                    (rows[0], rows[1]),
                    expected_rows(request, rank, per_node),
                )
            )
    return found


@cache
def answers_of(num_ranks: int) -> list[dict[str, Any]]:
    """What each rank of a run on `num_ranks` found; the run happens once."""
    return run_distributed(_worker, num_ranks)


def results(num_ranks: int) -> list[Found]:
    """The comparisons of all ranks."""
    return [found for answers in answers_of(num_ranks) for found in answers["found"]]


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_the_gathered_buffer_has_the_same_bits_and_the_early_slab_comes_first(
    num_ranks: int,
) -> None:
    for found in results(num_ranks):
        shards = found.request.num_clean_shards
        spans = "NodeGroup" if shards > found.per_node else "ProcessGroup"
        assert found.kinds == (spans, "NodeGroup")
        assert found.wrong == []
        assert found.gathered_bits, found


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_every_share_of_a_gradient_arrives_once(num_ranks: int) -> None:
    """Sums of whole numbers are exact in any order, so any other bit is an error."""
    for found in results(num_ranks):
        assert found.copies, found
        assert found.summed_bits, found


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_a_layer_is_exact_and_repeats_its_bits(num_ranks: int) -> None:
    for found in results(num_ranks):
        assert found.layer_error[0] == 0, "the output needs gathered keys alone"
        assert max(found.layer_error) < 1e-14, found  # fp64 sums in another order
        assert found.repeated, found


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_bytes_inside_and_between_nodes_are_those_of_the_formula(num_ranks: int) -> None:
    for found in results(num_ranks):
        assert found.rows == found.expected, found
    between = [x.rows[0].between for x in results(num_ranks) if x.request == cases(num_ranks)[0]]
    assert min(between) > 0


def _fixed_order(rank: int) -> bool:
    groups = by_node(make_groups(4, 4), 2)
    plan = make_plan(cases(4)[0], rank)
    shape = (plan.exchange.num_buffer_rows, 1, 2, 1, 1)
    grads = [random(shape, 40 + peer).float() for peer in range(4)]
    reduce = CleanReduce(grads[rank], plan.exchange, groups.clean_shards, torch.float32)
    reduce.grad_SZ2MH.copy_(grads[rank])
    reduce.start()
    got = torch.stack(reduce.finish(plan.rows.num_clean), 2)
    total = (grads[0] + grads[1]) + (grads[2] + grads[3])
    return got.equal(total[torch.from_numpy(plan.rows.position[: plan.rows.num_clean])])


def test_a_gradient_is_summed_inside_each_node_and_then_over_the_nodes() -> None:
    """To the bit: (rank 0 + rank 1) + (rank 2 + rank 3)."""
    assert all(answers["fixed_order"] for answers in answers_of(4))


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (2, 4), (4, 2), (3, 8), (1, 4), (4, 1)])
def test_by_node_moves_the_same_total_and_a_node_share_of_the_bytes_between(
    nodes: int, per_node: int
) -> None:
    shards = nodes * per_node
    request = PlanRequest(16 * shards, 4, num_ranks=shards, num_clean_shards=shards)
    exchange = make_plan(request, 0).exchange
    assert isinstance(exchange, SlabExchange)
    direct = exchange.link_rows(per_node, Route.DIRECT)
    by_node = exchange.link_rows(per_node, Route.BY_NODE)
    assert sum(direct) == sum(by_node) == exchange.sent_rows
    assert direct.between == per_node * by_node.between


@pytest.mark.parametrize("per_node", [0, 4])
def test_rows_by_link_need_full_nodes(per_node: int) -> None:
    exchange = make_plan(PlanRequest(96, 4, num_ranks=6, num_clean_shards=6), 0).exchange
    assert isinstance(exchange, SlabExchange)
    with pytest.raises(ValueError, match=f"ranks_per_node={per_node} must divide the 6 shards"):
        exchange.link_rows(per_node, Route.DIRECT)


@pytest.mark.parametrize("nodes", [[0, 0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]])
def test_ranks_that_do_not_fill_nodes_in_order_are_refused(nodes: list[int]) -> None:
    with pytest.raises(ValueError, match="equally many adjacent ranks on each node"):
        split_by_node(LocalGroup(), nodes)


def test_a_bound_device_is_refused_because_members_alone_could_not_make_groups() -> None:
    refuse_bound_device(SimpleNamespace(bound_device_id=None))
    with pytest.raises(ValueError, match=r"device_id=cuda:3; .* without device_id"):
        refuse_bound_device(SimpleNamespace(bound_device_id=torch.device("cuda", 3)))


@pytest.mark.parametrize("nodes", [[0], [0, 0, 0], [3, 1, 2]])
def test_a_group_that_saves_nothing_by_node_stays_as_it_is(nodes: list[int]) -> None:
    group = LocalGroup()
    assert split_by_node(group, nodes) is group


def _blocking(rank: int) -> dict[str, Any]:
    groups = make_groups(4, 4)
    node = by_node(groups, 2).clean_shards
    answers: dict[str, Any] = {"same": [], "pending": [], "early": 0}
    for group in (groups.context, node):
        assert isinstance(group, dist.ProcessGroup | NodeGroup)
        blocking = BlockGroups(groups.context, BlockingGroup(group), LocalGroup())
        for request in (cases(4)[0], cases(4)[4]):
            want = layer(request, groups, own_last=False)
            answers["same"].append(layer(request, blocking)[1].equal(want[1]))
            plan = make_plan(request, rank)
            k = torch.zeros(plan.rows.num_clean, 1, 1, 1)
            gather = CleanGather(k, k, plan.exchange, blocking.clean_shards)
            answers["pending"] += [x.work for x in gather._pending.values()]
            reduce = CleanReduce(
                gather.buffer_SZ2MH, plan.exchange, blocking.clean_shards, torch.float32
            )
            with counted() as sent:
                reduce.start()
            answers["early"] += len(sent)
            reduce.finish(len(k))
    return answers


def test_without_overlap_nothing_is_left_in_flight_and_nothing_else_changes() -> None:
    for answers in answers_of(4):
        assert all(answers["blocking"]["same"])
        assert answers["blocking"]["pending"] == [None] * (2 * (2 + 1))
        assert answers["blocking"]["early"] == 0, "reductions wait for the last launch"
