"""Sums in tiles become gradients in rows: the order, plain torch, and the Triton kernels.

Without a GPU the Triton kernels run in Triton's interpreter, in a process of their own because
the interpreter is chosen when Triton is imported.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_bp.attention import untile
from megatron_bp.attention.problems import KeyValue
from megatron_bp.attention.schedule import Runs, disjoint_rounds
from megatron_bp.attention.untile import (
    KeySums,
    Order,
    RowSums,
    Tiled,
    write_keys,
    write_rows,
)
from tests.interpreted import run_interpreted

ORDERS = {
    # head size: usual rows, tall rows, keys, as FlashAttention 4 has them on Hopper
    32: (Order(128, 32, 2, 2, False), Order(128, 32, 2, 2, False), Order(128, 32, 2, 2, False)),
    64: (Order(128, 64, 2, 2, False), Order(128, 64, 2, 2, False), Order(128, 64, 2, 2, False)),
    96: (Order(64, 96, 1, 1, False), Order(64, 96, 1, 1, False), Order(128, 96, 2, 2, False)),
    128: (Order(64, 128, 2, 1, False), Order(80, 128, 2, 1, True), Order(128, 128, 2, 2, False)),
    192: (Order(64, 192, 2, 1, False), Order(64, 192, 2, 1, False), Order(96, 192, 2, 2, True)),
    256: (Order(64, 256, 2, 1, False), Order(64, 256, 2, 1, False), Order(48, 256, 2, 1, True)),
}
ALL = sorted({order for orders in ORDERS.values() for order in orders})
SCALE = 0.25


def runs_of(starts: list[int], length: int, store: bool) -> Runs:
    """Runs without pieces."""
    at = np.array(starts)
    return Runs(at, length, store, disjoint_rounds(at, length))


def tiled(order: Order, rows: Tensor) -> Tiled:
    """Sums [B, padded rows, N, H] as the main kernel leaves them."""
    flat = torch.empty_like(rows.transpose(1, 2)).flatten(2)
    view = flat.unflatten(-1, (-1, order.rows * order.size))
    view[..., order.places.flatten().to(flat.device)] = (
        rows.transpose(1, 2).unflatten(2, (-1, order.rows)).flatten(3)
    )
    return Tiled(flat, order)


def draw(*shape: int, seed: int, device: str) -> Tensor:
    """Small integers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).float().to(device)


@pytest.mark.parametrize("order", ALL, ids=str)
def test_every_element_of_a_tile_has_a_place_of_its_own(order: Order) -> None:
    assert order.known
    places = order.places
    assert torch.equal(places.flatten().sort().values, torch.arange(order.rows * order.size))


@pytest.mark.parametrize("order", ALL, ids=str)
def test_places_are_those_of_the_accumulator_fragments_of_wgmma(order: Order) -> None:
    """As the PTX manual draws them: thread by thread and register by register."""
    high = order.groups // order.along_rows if order.swapped else order.along_rows
    height, width = (order.size, order.rows) if order.swapped else (order.rows, order.size)
    broad = width // (order.groups // high)
    places = order.places.T if order.swapped else order.places
    for group, thread in ((0, 0), (0, 37), (order.groups - 1, 127)):
        register = 0
        for tile in range(height // 64 // high):
            for column in range(0, broad, 8):
                for h in (0, 8):
                    for c in (0, 1):
                        lane, warp = thread % 32, thread // 32
                        m = 64 * (group % high + high * tile) + 16 * warp + h + lane // 4
                        n = broad * (group // high) + column + lane % 4 * 2 + c
                        piece = group * (order.rows * order.size // order.groups)
                        at = piece + register // 4 * 512 + thread * 4 + register % 4
                        assert places[m, n] == at
                        register += 1


@pytest.mark.parametrize(
    "order",
    [
        Order(4, 32, 2, 2, False),  # fewer rows than a warp group has
        Order(64, 128, 3, 2, False),
        Order(64, 128, 2, 0, False),
        Order(64, 100, 1, 1, False),
        Order(40, 128, 2, 1, True),  # a slab would be cut
        Order(80, 96, 2, 1, True),
    ],
)
def test_other_orders_are_not_known(order: Order) -> None:
    assert not order.known


@dataclass(frozen=True)
class Case:
    """What is written where."""

    size: int
    dtype: torch.dtype
    samples: int
    device: str


def check_rows(case: Case, groups: tuple[tuple[Order, Runs, bool], ...]) -> None:
    """Sums of groups of runs, joined to one problem or not; the first stores its rows."""
    size, samples, device = case.size, case.samples, case.device
    rows, heads = 160, 2
    dq = draw(rows, samples, heads, size, seed=9, device=device).to(case.dtype)
    want = dq.float() / SCALE
    found = []
    for seed, (order, runs, joined) in enumerate(groups):
        problems = runs.num_problems
        num_rows = problems * runs.length if joined else runs.length
        batch = samples if joined else samples * problems
        padded = -(-num_rows // order.rows) * order.rows
        sums = draw(batch, padded, heads, size, seed=seed, device=device)
        by_run = untile.by_problem(sums[:, :num_rows], samples, runs, joined)
        for x, start in enumerate(runs.starts):
            at = slice(int(start), int(start) + runs.length)
            if runs.store:
                dq[at], want[at] = float("nan"), 0.0
            want[at] += by_run[x]
        sums[:, num_rows:] = 1000.0  # beyond the rows
        found.append(RowSums(tiled(order, sums), runs, joined))
    write_rows(dq, found, SCALE)
    assert torch.equal(dq, (want * SCALE).to(case.dtype))


def row_groups(size: int) -> dict[str, tuple[tuple[Order, Runs, bool], ...]]:
    """Groups that share the pass over all rows, and such that cannot."""
    usual, tall, _ = ORDERS[size]
    whole = (usual, runs_of([0], 160, True), False)
    swapped = Order(80, 192, 1, 1, True)  # its columns are padded in another way
    two, one = runs_of([16, 80], 48, False), runs_of([32], 100, False)
    return {
        "joined, and one run": (whole, (tall, two, True), (tall, one, False)),
        "apart, in both orders": (whole, (tall, two, False), (usual, one, False)),
        "slabs cut": (whole, (tall, runs_of([37], 100, False), False)),
        "slabs of the second run cut": (whole, (tall, runs_of([16, 72], 48, False), False)),
        "slabs of the joined run cut": (whole, (tall, runs_of([16, 80], 40, False), True)),
        "uneven": (whole, (tall, runs_of([99, 16, 64], 30, False), True)),
        "not all rows": ((tall, runs_of([64], 90, True), False), (tall, two, False)),
        "other columns": (whole, (swapped, one, False)) if size == 192 else (whole,),
    }


def check_keys(case: Case, groups: tuple[Runs, ...]) -> None:
    """dK and dV of groups of runs, stored or added in turn; other rows stay as they were."""
    size, samples, device = case.size, case.samples, case.device
    heads, rows, order = 2, 320, ORDERS[size][2]
    packed = draw(rows, samples, 2, heads, size, seed=9, device=device).to(case.dtype)
    want, found = packed.float(), []
    for seed, runs in enumerate(groups):
        padded = -(-runs.length // order.rows) * order.rows
        batch = 2 * samples * runs.num_problems
        sums = draw(batch, padded, heads, size, seed=10 + seed, device=device)
        values = sums[:, : runs.length].unflatten(0, (2, samples, -1)).permute(2, 3, 1, 0, 4, 5)
        values = values * torch.tensor([SCALE, 1.0], device=device)[:, None, None]
        for x, start in enumerate(runs.starts):
            for lo, piece in runs.pieces or ((0, runs),):
                at = slice(int(start) + lo, int(start) + lo + piece.length)
                if piece.store:
                    packed[at], want[at] = float("nan"), 0.0
                want[at] += values[x, lo : lo + piece.length]
        sums[:, runs.length :] = 1000.0  # beyond the rows
        found.append(KeySums(tiled(order, sums), runs))
    write_keys(KeyValue(packed[:, :, 0], packed[:, :, 1]), found, SCALE)
    assert torch.equal(packed, want.to(case.dtype))


def pieces() -> Runs:
    """One run that is stored in part, cut where slabs are not."""
    parts = [runs_of([7 + lo], n, store) for lo, n, store in ((0, 37, True), (37, 83, False))]
    return replace(runs_of([7], 120, False), pieces=((0, parts[0]), (37, parts[1])))


TWO = runs_of([3, 130], 100, True)
KEYS = {
    "one": (runs_of([3], 250, True),),
    "apart": (TWO,),
    "uneven": (runs_of([210, 3, 130], 50, False),),
    "overlapping": (runs_of([5, 37, 69, 101], 90, False),),
    "overlapping, slabs cut": (runs_of([5, 30, 55], 40, False),),
    "in pieces": (pieces(),),
    "in runs of others": (TWO, runs_of([19, 35, 51], 40, False), runs_of([146, 162], 45, False)),
    "in a run, but slabs cut": (TWO, runs_of([140, 156, 172], 50, False)),
    "in a run, but slabs of the second one cut": (TWO, runs_of([19, 39], 30, False)),
    "in two runs": (TWO, runs_of([35, 131], 60, False)),
}
CASES = ((64, torch.float32), (96, torch.bfloat16), (128, torch.bfloat16), (192, torch.float32))
CASES = (*CASES, (256, torch.float16), (128, torch.float32))


def check_all(device: str) -> None:
    """Every kind of rows at head sizes 128 and 192, of runs at 256, some at the others."""
    for number, (size, dtype) in enumerate(CASES):
        case = Case(size, dtype, 1 + number % 2, device)
        for at, groups in enumerate(row_groups(size).values()):
            if number in (2, 3) or at == number:
                check_rows(case, groups)
        for at, runs in enumerate(KEYS.values()):
            if size == 256 or at in (number, 6):
                check_keys(case, runs)


def test_torch_equals_sums_in_rows() -> None:
    check_all("cpu")


def test_triton_kernels_equal_sums_in_rows_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(__file__)


def _interpret() -> None:
    """Sends CPU tensors to the Triton kernels."""
    from megatron_bp.attention import triton_untile

    globals().update(write_rows=triton_untile.write_rows, write_keys=triton_untile.write_keys)
    check_all("cpu")


if __name__ == "__main__":
    _interpret()
