"""Merging partial results equals attention over the union of their keys."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_bp.attention.merge import merge

Part = tuple[Tensor, Tensor]
ROWS, SIZE = 5, 3
SCORES = st.one_of(st.just(-math.inf), st.floats(-50, 50))


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """A partial result as a kernel would give it: out is 0 where the LSE is -inf."""
    lse = torch.tensor(draw(st.lists(SCORES, min_size=ROWS, max_size=ROWS)), dtype=torch.float64)
    values = st.lists(st.floats(-10, 10), min_size=ROWS * SIZE, max_size=ROWS * SIZE)
    out = torch.tensor(draw(values), dtype=torch.float64).view(ROWS, SIZE)
    return out.masked_fill(torch.isneginf(lse)[:, None], 0.0), lse


def assert_same(a: Part, b: Part) -> None:
    """Equal to fp64 rounding of a few operations; infinities included."""
    torch.testing.assert_close(a[0], b[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(a[1], b[1], rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(parts(), parts())
def test_merge_is_commutative(a: Part, b: Part) -> None:
    assert_same(merge(*a, *b), merge(*b, *a))


@settings(max_examples=100, deadline=None)
@given(parts(), parts(), parts())
def test_merge_is_associative(a: Part, b: Part, c: Part) -> None:
    assert_same(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))


@settings(max_examples=100, deadline=None)
@given(parts())
def test_an_empty_part_changes_nothing(a: Part) -> None:
    empty = torch.zeros(ROWS, SIZE).double(), torch.full((ROWS,), -math.inf).double()
    assert_same(merge(*a, *empty), a)
    assert_same(merge(*empty, *a), a)


@settings(max_examples=100, deadline=None)
@given(parts(), parts())
def test_a_merged_row_lies_between_its_parts(a: Part, b: Part) -> None:
    out, lse = merge(*a, *b)
    assert not out.isnan().any()
    assert (lse >= torch.maximum(a[1], b[1])).all()
    both = ~torch.isneginf(a[1]) & ~torch.isneginf(b[1])
    low, high = torch.minimum(a[0], b[0]), torch.maximum(a[0], b[0])
    assert ((out >= low - 1e-12) & (out <= high + 1e-12))[both].all()


def test_two_empty_parts_merge_to_an_empty_row_without_nan() -> None:
    out, lse = merge(*[torch.zeros(2, 3), torch.full((2,), -math.inf)] * 2)
    assert (out == 0).all()
    assert torch.isneginf(lse).all()


def test_merge_equals_softmax_over_all_keys() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 9, generator=generator, dtype=torch.float64) * 5
    values = torch.randn(9, 3, generator=generator, dtype=torch.float64)

    def part(keys: slice) -> Part:
        return scores[:, keys].softmax(-1) @ values[keys], scores[:, keys].logsumexp(-1)

    assert_same(merge(*part(slice(0, 4)), *part(slice(4, 9))), part(slice(0, 9)))


def test_two_equal_parts_average_and_add_log_two() -> None:
    out, lse = merge(torch.tensor([1.0]), torch.tensor(3.0), torch.tensor([2.0]), torch.tensor(3.0))
    assert out.item() == pytest.approx(1.5, rel=1e-6)
    assert lse.item() == pytest.approx(3.0 + math.log(2), rel=1e-6)


@pytest.mark.parametrize("lse", [-1e4, 1e4])
def test_large_scores_cost_the_output_nothing(lse: float) -> None:
    out, merged = merge(torch.ones(1), torch.tensor(lse), torch.ones(1), torch.tensor(lse))
    rounding = torch.finfo(torch.float32).eps * abs(lse)  # of the fp32 LSE itself
    assert out.item() == pytest.approx(1.0, rel=torch.finfo(torch.float32).eps)
    assert merged.item() == pytest.approx(lse + math.log(2), abs=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_result_has_the_dtype_of_the_lse(dtype: torch.dtype) -> None:
    out = torch.ones(2, 3, dtype=torch.bfloat16)
    merged = merge(out, torch.zeros(2, dtype=dtype), out, torch.zeros(2, dtype=dtype))
    assert [x.dtype for x in merged] == [dtype, dtype]
