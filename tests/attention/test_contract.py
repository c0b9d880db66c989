"""A kernel's capabilities are compared with a layer's need, and every reason is given."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from megatron_bp.attention.contract import (
    IntervalMask,
    KernelCaps,
    KernelNeed,
    Strategy,
    lse_dtype,
    missing,
)
from megatron_bp.layout.plan import PlanRequest, make_plan
from megatron_bp.layout.visibility import dense_mask
from tests.layout.test_decomposition import requests

CAPS = KernelCaps(
    strategies=frozenset({Strategy.NATIVE}),
    devices=frozenset({"cuda"}),
    dtypes=frozenset({torch.bfloat16, torch.float16}),
    max_head_size=256,
    head_multiple=8,
    windows=False,
    deterministic=False,
    min_arch=80,
    max_arch=90,
)
NEED = KernelNeed(Strategy.NATIVE, "cuda", torch.bfloat16, 128, window=False, arch=90)


def test_a_need_within_the_capabilities_misses_nothing() -> None:
    assert missing(CAPS, NEED) == []
    assert missing(CAPS, replace(NEED, dtype=torch.float16, head_size=256, arch=80)) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"strategy": Strategy.INTERVAL}, "it has no interval form"),
        ({"device": "cpu"}, "it runs on cuda, not on cpu"),
        ({"dtype": torch.float32}, "it takes bfloat16, float16, not float32"),
        ({"head_size": 264}, "it takes head sizes up to 256 in multiples of 8, not 264"),
        ({"head_size": 12}, "it takes head sizes up to 256 in multiples of 8, not 12"),
        ({"window": True}, "it has no sliding window"),
        ({"deterministic": True}, "its backward is not deterministic"),
        ({"arch": 75}, "it needs compute capability 80..90, not 75"),
        ({"arch": 100}, "it needs compute capability 80..90, not 100"),
    ],
)
def test_each_lack_is_one_sentence(change: dict, reason: str) -> None:
    assert missing(CAPS, replace(NEED, **change)) == [reason]


def test_all_reasons_are_given_at_once() -> None:
    need = replace(NEED, strategy=Strategy.INTERVAL, head_size=12, window=True)
    assert len(missing(CAPS, need)) == 3


def test_compute_capability_matters_on_cuda_only() -> None:
    caps = replace(CAPS, devices=frozenset({"cpu", "cuda"}))
    assert missing(caps, replace(NEED, device="cpu", arch=0)) == []


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_the_lse_is_fp32_and_fp64_for_fp64(dtype: torch.dtype, want: torch.dtype) -> None:
    assert lse_dtype(dtype) == want


@settings(max_examples=60, deadline=None)
@given(requests())
def test_an_interval_mask_is_the_mask_of_the_plan(request: PlanRequest) -> None:
    plan = make_plan(request, request.num_ranks - 1)
    seen = plan.visibility
    names = np.concatenate([plan.exchange.buffer_position, plan.own_coordinate])
    mask = IntervalMask(
        *(torch.from_numpy(x) for x in (seen.clean_lo, seen.clean_hi, seen.own_lo, seen.own_hi)),
        key_name=torch.from_numpy(names.astype(np.int32)),
        num_clean=plan.exchange.num_buffer_rows,
    )
    want = dense_mask(seen, plan.exchange.buffer_position, plan.own_coordinate)
    np.testing.assert_array_equal(mask.dense().numpy(), want)
