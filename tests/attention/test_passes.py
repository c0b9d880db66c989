"""The small passes equal their formulas, in plain torch and as Triton kernels.

Without a GPU the Triton kernels run in Triton's interpreter, in a process of their own because
the interpreter is chosen when Triton is imported.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_bp.attention import passes
from megatron_bp.attention.merge import merge
from megatron_bp.attention.schedule import Runs, disjoint_rounds
from megatron_bp.layout.exchange import Copy
from tests.interpreted import run_interpreted

ROWS, SAMPLES, KV_HEADS, GROUP, SIZE = 12, 2, 3, 2, 6
CASES = {
    "back to back": (np.array([4, 7]), 3),
    "apart": (np.array([9, 1, 6]), 2),
    "overlapping": (np.array([3, 4, 5, 8]), 3),
    "evenly apart": (np.array([1, 5, 9]), 2),
    "evenly overlapping": (np.array([1, 3, 5]), 5),
    "one": (np.array([2]), 7),
}


def runs_of(name: str, store: bool) -> Runs:
    """The runs of a case."""
    starts, length = CASES[name]
    return Runs(starts, length, store, disjoint_rounds(starts, length))


def random(*shape: int, seed: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def merge_inputs(runs: Runs, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """out, lse, and a part with folded heads (a permuted view); both with some empty rows."""
    heads = KV_HEADS * GROUP
    out = random(ROWS, SAMPLES, heads, SIZE, seed=1, device=device, dtype=dtype)
    lse = random(SAMPLES, heads, ROWS, seed=2, device=device).permute(2, 0, 1)
    x, q = runs.num_problems, runs.length
    part = random(SAMPLES, q, KV_HEADS, x, GROUP, SIZE, seed=3, device=device, dtype=dtype)
    part_lse = random(SAMPLES, KV_HEADS, x, GROUP, q, seed=4, device=device)
    part_lse[:, 0, :, :, ::2] = float("-inf")
    part[:, ::2, 0] = 0
    lse[::3] = float("-inf")
    out[::3] = 0
    return out, lse, part.permute(3, 1, 0, 2, 4, 5), part_lse.permute(2, 4, 0, 1, 3)


def check_merge(name: str, store: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """merge_rows against the formula, row by row; other rows stay as they were."""
    runs = runs_of(name, store)
    out, lse, part, part_lse = merge_inputs(runs, device, dtype)
    want_out, want_lse = out.clone(), lse.clone()
    for x, start in enumerate(runs.starts):
        rows = slice(int(start), int(start) + runs.length)
        new, new_lse = part[x].flatten(2, 3).float(), part_lse[x].flatten(2, 3)
        if not store:
            new, new_lse = merge(want_out[rows].float(), want_lse[rows], new, new_lse)
        want_out[rows], want_lse[rows] = new.to(dtype), new_lse
    if store:  # a stored row must not depend on what was there
        for start in runs.starts:
            out[int(start) : int(start) + runs.length] = float("nan")
            lse[int(start) : int(start) + runs.length] = float("nan")
    passes.merge_rows(out, lse, runs, part, part_lse)
    torch.testing.assert_close(out, want_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, want_lse, rtol=1e-6, atol=1e-6)


def check_add(name: str, store: bool, device: str, packed: bool) -> None:
    """add_rows of bf16 values into fp32 rows, for a packed pair or for one tensor."""
    runs = runs_of(name, store)
    pair = random(ROWS, SAMPLES, 2, KV_HEADS, SIZE, seed=5, device=device)
    values = tuple(
        random(runs.num_problems, SAMPLES, runs.length, KV_HEADS, SIZE, seed=s, device=device)
        .bfloat16()
        .transpose(1, 2)
        for s in (6, 7)
    )
    targets = (pair[:, :, 0], pair[:, :, 1]) if packed else (pair[:, :, 0].clone(),)
    values = values[: len(targets)]
    want = [target.clone() for target in targets]
    for target, value in zip(want, values, strict=True):
        for x, start in enumerate(runs.starts):
            rows = slice(int(start), int(start) + runs.length)
            target[rows] = value[x].float() + (0 if store else target[rows])
    passes.add_rows(targets, runs, values)
    for target, expected in zip(targets, want, strict=True):
        torch.testing.assert_close(target, expected, rtol=1e-6, atol=1e-6)


def check_pad(name: str, joined: bool, device: str) -> None:
    """pad_rows, column by column."""
    runs = runs_of(name, store=False)
    x = random(2, SAMPLES, KV_HEADS, ROWS, seed=8, device=device)
    length = runs.length * (runs.num_problems if joined else 1)
    got = passes.pad_rows(x, runs, joined, length + 3, 1e30)
    found = [x[..., int(start) : int(start) + runs.length] for start in runs.starts]
    want = torch.cat(found, 3) if joined else torch.stack(found, 1).flatten(1, 2)
    assert torch.equal(got[..., :length], want)
    assert (got[..., length:] == 1e30).all()
    assert got.shape == (*want.shape[:3], length + 3)


def check_pack(device: str) -> None:
    """pack_rows of three runs and an empty one, of keys and values that lie apart."""
    wide = random(ROWS, SAMPLES, KV_HEADS, 3, SIZE, seed=1, device=device).bfloat16()
    k, v = wide[:, :, :, 2].contiguous(), wide[:, :, :, 1]
    copies = (Copy(6, 1, 3), Copy(0, 7, 2), Copy(2, 2, 0), Copy(3, 9, 1))
    buffer = torch.ones(ROWS, SAMPLES, 2, KV_HEADS, SIZE, device=device, dtype=k.dtype)
    want = buffer.clone()
    for source, target, length in copies:
        for i, x in enumerate((k, v)):
            want[target : target + length, :, i] = x[source : source + length]
    passes.pack_rows(k, v, copies, buffer)
    assert torch.equal(buffer, want)


def check_part(own: bool, device: str) -> None:
    """write_part in fp32 and bf16, beside rows that stay as they are."""
    part = random(5, SAMPLES, 2, KV_HEADS, SIZE, seed=1, device=device)
    beside = [random(ROWS, SAMPLES, KV_HEADS, SIZE, seed=s, device=device) for s in (2, 3)]
    for dtype, tolerance in ((torch.float32, 0.0), (torch.bfloat16, 2**-7)):
        wide = torch.ones(ROWS, SAMPLES, KV_HEADS + 1, SIZE, device=device, dtype=dtype)
        into = wide[:, :, 1:], wide.clone()[:, :, 1:]
        passes.write_part(part, 4, tuple(beside) if own else (), into)
        for i, found in enumerate(into):
            want = part[:, :, i] + (beside[i][4:9] if own else 0)
            torch.testing.assert_close(found[4:9], want.to(dtype), rtol=tolerance, atol=0)
            assert (found[:4] == 1).all()
            assert (found[9:] == 1).all()


def check_all(device: str) -> None:
    """Every case on `device`."""
    check_pack(device)
    for own in (False, True):
        check_part(own, device)
    for name in CASES:
        for joined in (False, True):
            check_pad(name, joined, device)
        for store in (False, True):
            if store and "overlapping" in name:
                continue  # overlapping runs never store
            check_add(name, store, device, packed=True)
            check_add(name, store, device, packed=False)
            if "overlapping" not in name:
                check_merge(name, store, device, torch.float32, 1e-6)
                check_merge(name, store, device, torch.bfloat16, 2**-7)


def test_torch_passes_equal_their_formulas() -> None:
    check_all("cpu")


@pytest.mark.parametrize("samples", [1, SAMPLES])
@pytest.mark.parametrize("name", CASES)
def test_problems_are_the_rows_of_their_runs_sample_by_sample(name: str, samples: int) -> None:
    wide = random(2 * ROWS, samples, KV_HEADS, SIZE, seed=1, device="cpu")
    x, runs = wide[2 : 2 + ROWS, :, 1:], runs_of(name, store=False)
    found = passes.read_problems(x, runs)
    rows = [
        x[int(start) : int(start) + runs.length, z] for start in runs.starts for z in range(samples)
    ]
    assert torch.equal(found, torch.stack(rows))
    even = len(set(np.diff(runs.starts))) <= 1 and (np.diff(runs.starts) > 0).all()
    in_place = bool(even) and 1 in (samples, runs.num_problems)
    assert (found.untyped_storage().data_ptr() == wide.untyped_storage().data_ptr()) == in_place


@pytest.mark.parametrize("samples", [1, SAMPLES])
def test_halves_of_a_packed_buffer_are_cleared_as_one(samples: int) -> None:
    packed = random(ROWS, samples, 2, KV_HEADS, SIZE, seed=1, device="cpu")
    before, part = packed.clone(), packed[1:-1]
    (both,) = passes.in_one((part[:, :, 0], part[:, :, 1]))
    assert both[2:5].is_contiguous()
    both[2:5] = 0
    assert not packed[3:6].any()
    packed[3:6] = before[3:6]
    assert torch.equal(packed, before)


def test_what_is_not_packed_side_by_side_stays_two() -> None:
    packed = random(ROWS, SAMPLES, 2, KV_HEADS, SIZE, seed=1, device="cpu")
    k, v = packed[:, :, 0], packed[:, :, 1]
    for pair in ((v, k), (k, k), (k.clone(), v.clone()), (k[..., 1:], v[..., 1:]), (k, v[1:])):
        assert passes.in_one(pair) == pair


def test_triton_passes_equal_their_formulas_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted(__file__)


def _interpret() -> None:
    """Sends CPU tensors to the Triton kernels."""
    from megatron_bp.attention import triton_moves, triton_passes

    def merge_rows(out: Tensor, lse: Tensor, runs: Runs, part: Tensor, part_lse: Tensor) -> None:
        starts = passes.starts_on(runs, out.device)
        triton_passes.merge_rows(out, lse, starts, part, part_lse, store=runs.store)

    def add_rows(targets: tuple[Tensor, ...], runs: Runs, values: tuple[Tensor, ...]) -> None:
        if runs.step:
            spacing = int(runs.starts[0]), runs.step
            triton_passes.sum_rows(targets, spacing, values, store=runs.store)
            return
        starts = passes.starts_on(runs, targets[0].device)
        for members in passes.rounds_on(runs, starts.device):
            triton_passes.add_rows(targets, starts, members, values, store=runs.store)

    def pad_rows(x: Tensor, runs: Runs, joined: bool, num_rows: int, beyond: float) -> Tensor:
        batch = SAMPLES * (1 if joined else runs.num_problems)
        into = torch.full((len(x), batch, x.shape[2], num_rows), float("nan"))
        starts = passes.starts_on(runs, x.device)
        triton_moves.pad_rows(x, starts, runs.length, into, beyond, joined=joined)
        return into

    passes.merge_rows, passes.add_rows, passes.pad_rows = merge_rows, add_rows, pad_rows
    passes.write_part, passes.pack_rows = triton_moves.write_part, triton_moves.pack_rows
    check_all("cpu")


if __name__ == "__main__":
    _interpret()
