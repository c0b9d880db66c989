"""FlashAttention 4's shared backward gives the gradients of separate launches, over stand-ins.

The package is not needed: its three kernels are replaced by plain torch that reads and writes whole
tiles as they do, so a wrong view, a tail that weighs something, or memory that nobody wrote shows.
Buffers hold rows one after another here, and the package's kernel rounds them, or each tile in an
order of its own, known to untile.py.
"""

import math
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.nn.functional import pad

import megatron_bp.attention as package
from megatron_bp.attention.contract import Cut, Window, window_mask
from megatron_bp.attention.kernels.dense import DenseKernel
from megatron_bp.attention.schedule import make_schedule
from megatron_bp.attention.sharing import Shared, TileRule, share
from megatron_bp.layout.decomposition import KeySpace
from megatron_bp.layout.plan import PlanRequest, make_plan
from tests.attention.test_own_last import Layer, pass_of
from tests.attention.test_sharing import SharingDense, gradients
from tests.layout.test_decomposition import requests
from tests.stand_ins import import_over

LOG2_E = math.log2(math.e)
WIDE = 32  # what the package rounds head sizes up to
LONG = 12  # keys from which on unmasked launches have the taller tile, here


FIELDS = "m_block_size n_block_size num_wg num_stages_Q num_stages_dO num_stages_PdS SdP_swapAB"
FIELDS += " dKV_swapAB dQ_swapAB AtomLayoutMSdP AtomLayoutNdKV AtomLayoutMdQ dQ_single_wg"
Config = namedtuple("Config", FIELDS)  # the package's; all but the tiles is handed through


class InFloat64:
    """torch as flash4_sums.py has it here: sums in fp64, and new memory that holds NaN."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *args: Any, **options: Any) -> Tensor:
        """Like torch.empty."""
        return torch.empty(*args, **options).fill_(math.nan)


class Shuffled(NamedTuple):
    """An order as untile.py takes it."""

    rows: int
    size: int
    known = True

    @property
    def places(self) -> Tensor:
        """Place in the tile of each element, [rows, size]."""
        generator = torch.Generator().manual_seed(self.rows)
        return torch.randperm(self.rows * self.size, generator=generator).view(*self)


class Kernels:
    """Stand-ins for the three kernels, and counts of the first and last one's runs."""

    def __init__(self, in_order: bool) -> None:
        self.in_order = in_order
        self.prepared = self.rounded = 0

    def prepare(self, out: Tensor, dout: Tensor, *args: Any, **options: Any) -> None:
        """LSE to base 2 and row sums of whole tiles, beyond the rows infinite and 0."""
        row_sum, lse, lse2, dq, *_, tile = args
        assert dq is None
        rows = out.shape[1]
        stop = -(-rows // tile) * tile
        row_sum[..., :stop], lse2[..., :stop] = 0, math.inf
        row_sum[..., :rows] = (out * dout).sum(-1).transpose(1, 2)
        lse2[..., :rows] = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse * LOG2_E)
        self.prepared += 1

    def places(self, tile: int, size: int) -> Tensor:
        """Of the elements of a tile."""
        if self.in_order:
            return Shuffled(tile, size).places
        return torch.arange(tile * WIDE).view(tile, WIDE)[:, :size]

    def main(self, kind: Any, *args: Any) -> None:
        """Adds to dQ, dK and dV; rows of the last tile beyond the launch's have q and dout 0."""
        q, k, v, dout, lse2, row_sum, dq, dk, dv, scale = args[:10]
        left, right = args[14:16]
        num_rows, num_keys, tall = q.shape[1], k.shape[1], lse2.shape[2]
        assert tall % kind.tile_m == 0
        window = Window(-1, 0 if kind.causal else -1)
        if kind.is_local:
            window = Window(-1 if left is None else left, right)
        seen = torch.ones(tall, num_keys, dtype=torch.bool)
        seen[:num_rows] = window_mask(num_rows, num_keys, window, q.device)
        q, dout = (torch.cat([x, x.new_zeros(len(x), tall - num_rows, *x.shape[2:])], 1)
                   for x in (q, dout))  # fmt: skip
        groups = q.shape[2] // k.shape[2]
        wide_k, wide_v = (x.repeat_interleave(groups, 2) for x in (k, v))
        s = torch.einsum("xqnh,xknh->xnqk", q, wide_k) * scale * LOG2_E
        p = torch.where(seen, torch.exp2(s - lse2[..., None]), 0.0)
        ds = p * (torch.einsum("xqnh,xknh->xnqk", dout, wide_v) - row_sum[..., None])
        for into, tile, part in (
            (dq, kind.tile_m, torch.einsum("xnqk,xknh->xnqh", ds, wide_k)),
            (dk, kind.tile_n, torch.einsum("xnqk,xqnh->xnkh", ds, q)),
            (dv, kind.tile_n, torch.einsum("xnqk,xqnh->xnkh", p, dout)),
        ):
            per_head = part.unflatten(1, (into.shape[1], -1)).sum(2)
            per_head = pad(per_head, (0, 0, 0, -per_head.shape[2] % tile)).unflatten(2, (-1, tile))
            places = self.places(tile, part.shape[-1])
            each = into.shape[2] // per_head.shape[2]
            for x in range(len(into)):  # one after another: problems may overlap in the buffer
                into[x].unflatten(1, (-1, each))[..., places] += per_head[x]

    def convert(self, wide: Tensor, into: Tensor, scale: float, *_: Any, **options: Any) -> None:
        """Rounds a buffer to the model's dtype."""
        self.rounded += 1
        rows = wide.unflatten(2, (-1, options["hdim_multiple_of"]))
        into.copy_(rows[:, :, : into.shape[1], : into.shape[3]].transpose(1, 2) * scale)


def stand_ins(kernels: Kernels) -> dict[str, dict[str, Any]]:
    """What flash4_sums.py imports, by module."""

    def kind(*args: Any, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(causal=args[4], **options)

    def compiled(kind: Any, *args: Any, **options: Any) -> Any:
        return lambda *given: kernels.main(kind, *given)

    def tile(size: int, size_v: int, causal: bool, local: bool) -> Config:
        return Config(4 if causal or local else 5, 4, *(2,) * 11)._replace(dKV_swapAB=False)

    runtime = SimpleNamespace(make_fake_stream=lambda **_: None)
    return {
        "cutlass": {},
        "cutlass.cute": {"runtime": runtime, "compile": compiled},
        "flash_attn": {},
        "flash_attn.cute": {},
        "flash_attn.cute.cache_utils": {"get_jit_cache": lambda _: {}},
        "flash_attn.cute.cute_dsl_utils": {"maybe_contiguous": lambda x: x},
        "flash_attn.cute.flash_bwd_sm90": {"FlashAttentionBackwardSm90": kind},
        "flash_attn.cute.utils": {"AuxData": lambda *_: None},
        "flash_attn.cute.interface": {
            "_bwd_preprocess": kernels.prepare,
            "_bwd_postprocess_convert": kernels.convert,
            "_tile_size_bwd_sm90": tile,
            "make_fake_bwd_tensors": lambda *_, **__: (None,) * 15,
            "torch2cute_dtype_map": {torch.float64: "f64"},
        },
    }


@pytest.fixture(scope="module", params=[False, True], ids=["rounded", "in-order"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The stand-ins of this file."""
    return Kernels(request.param)


@pytest.fixture(scope="module")
def sums(kernels: Kernels) -> Any:
    """A copy of flash4_sums.py over the stand-ins; the one that others import is untouched."""
    path = Path(package.__file__).with_name("flash4_sums.py")
    module = import_over(path, stand_ins(kernels))
    module.torch, module.LONG = InFloat64(), LONG
    if kernels.in_order:
        module._head_multiple = lambda size: size
        module._row_order = lambda size, tall: Shuffled(5 if tall else 4, size)
        module._key_order = lambda size: Shuffled(4, size)
    return module


def sharing(sums: Any) -> DenseKernel:
    """The plain kernel with flash4's shared backward."""

    class Kernel(SharingDense):
        def tiles(self, head_size: int) -> TileRule:
            return sums.tiles(head_size)

        def share(self, like: Tensor, queries_per_key: int, shared: Shared, scale: float) -> Any:
            return sums.Flash4Backward(like, queries_per_key, shared, scale)

    return Kernel()


def check(sums: Any, request: PlanRequest, corrupted_only: bool) -> None:
    """All gradients of the last rank against separate launches."""
    plan = make_plan(request, request.num_ranks - 1)
    exact = gradients(plan, DenseKernel(), corrupted_only)
    for got, want in zip(gradients(plan, sharing(sums), corrupted_only), exact, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(request=requests())
def test_any_plan_gives_the_gradients_of_separate_launches(sums: Any, request: PlanRequest) -> None:
    check(sums, request, corrupted_only=False)


@pytest.mark.parametrize("window", [0, 300])
def test_blocks_of_whole_tiles_and_tall_launches_give_them_too(sums: Any, window: int) -> None:
    request = PlanRequest(
        length=1536, block_size=128, num_ranks=4, num_clean_shards=4, window=window
    )
    check(sums, request, corrupted_only=False)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_pass_in_two_parts_gives_them_too(sums: Any, rank: int) -> None:
    request = PlanRequest(length=512, block_size=32, num_ranks=4, num_clean_shards=4)
    plan = make_plan(request, rank)
    exact = Layer(plan, DenseKernel(), corrupted_only=False)
    want, _ = exact.backward(exact.schedule.backward)
    got, sent = Layer(plan, sharing(sums), corrupted_only=False).backward(pass_of(plan))
    assert len(sent) == 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def test_rows_are_prepared_once_and_rounded_only_if_their_order_is_not_known(
    sums: Any, kernels: Kernels
) -> None:
    """All rows see the keys before the early chunk, in the tall tile; squares have the other."""
    request = PlanRequest(length=256, block_size=32, num_ranks=4, num_clean_shards=4)
    plan, rule = make_plan(request, 3), sums.tiles(8)
    num_rows, before, rounded = plan.rows.num_rows, kernels.prepared, kernels.rounded
    found = share(make_schedule(plan, False, Cut.CHUNKS).backward, rule, lambda _: False)
    all_rows = [x for x in found.rows if x.runs.length == num_rows]
    assert {x.tile for x in all_rows} == {rule.usual.rows, rule.long.rows}
    assert len(found.rows) > len(all_rows)
    assert num_rows % rule.long.rows, "the tall tile should need a tail"
    gradients(plan, sharing(sums), corrupted_only=False)
    assert kernels.prepared - before == 1
    assert (kernels.rounded - rounded == 0) is kernels.in_order


def test_sums_of_keys_have_memory_from_their_first_launch_until_they_are_written(
    sums: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a reduction which starts before the last launches finds room for its buffers."""
    made, held = [], []
    plan = make_plan(PlanRequest(256, 32, num_ranks=4, num_clean_shards=4), 2)
    whole = sums.Flash4Backward

    def noted(*args: Any) -> Any:
        made.append(whole(*args))
        return made[-1]

    monkeypatch.setattr(sums, "Flash4Backward", noted)

    def reduction_starts() -> None:
        (work,) = made
        held.append({work.shared.keys[i].space for i in work.key_sums})

    Layer(plan, sharing(sums), corrupted_only=False).backward(pass_of(plan), reduction_starts)
    assert len(held) == 1
    assert KeySpace.CLEAN not in held[0]
    assert {x.space for x in made[0].shared.keys} >= {KeySpace.CLEAN, KeySpace.SHARD}
    assert not made[0].key_sums


def test_nothing_of_the_stand_ins_is_left_for_others(sums: Any) -> None:
    assert sums.__name__ not in sys.modules
    left = [sys.modules[name] for name in stand_ins(Kernels(in_order=False)) if name in sys.modules]
    assert all(module.__spec__ for module in left)
