"""Specifies megatron_bp.objectives.loss: exactness, padding, exclusion, memory, tensor parallel.

What only a GPU can show is in test_gpu_loss.py.
"""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_bp.objectives import (
    LOCAL,
    LossOptions,
    linear_cross_entropy,
    weighted_cross_entropy,
)
from megatron_bp.objectives.head import scaled
from tests.distributed import run_distributed

PROPERTY = settings(deadline=None, derandomize=True)
FORMS = ("recomputed", "in_forward")
both_forms = pytest.mark.parametrize("form", FORMS)
EXACT = {"rtol": 0.0, "atol": 1e-12}  # fp64 rounding of sums over < 100 terms of size ~1


def make_case(
    rows: int, hidden_size: int, vocab: int, options: LossOptions, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, labels that count, and the weight of each row's loss."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, hidden_size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden_size, generator=generator, dtype=torch.float64)
    allowed = [v for v in range(options.num_valid_vocab) if v != options.excluded_id]
    labels = torch.tensor(allowed)[torch.randint(len(allowed), (rows,), generator=generator)]
    row_weight = torch.rand(rows, generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), labels, row_weight


def dense(hidden: Tensor, weight: Tensor, labels: Tensor, options: LossOptions) -> Tensor:
    """The definition, with the whole [R, V] tensor."""
    logits = hidden @ weight.t()
    ids = torch.arange(len(weight))
    dead = (ids >= options.num_valid_vocab) | (ids == options.excluded_id)
    logp = logits.masked_fill(dead, float("-inf")).log_softmax(1)
    return -logp.gather(1, labels[:, None]).squeeze(1)


Operands = tuple[Tensor, Tensor, Tensor, Tensor]


def total_and_loss(
    form: str, operands: Operands, options: LossOptions, group: Any = LOCAL
) -> tuple[Tensor, Tensor]:
    """sum(row_weight * loss), and the loss of each row."""
    hidden, weight, labels, row_weight = operands
    if form == "in_forward":
        return weighted_cross_entropy(
            hidden, weight, labels, row_weight, options=options, group=group
        )
    if form == "dense":
        loss = dense(hidden, weight, labels, options)
    else:
        loss = linear_cross_entropy(hidden, weight, labels, options=options, group=group)
    return (loss * row_weight.to(loss.dtype)).sum(), loss


def with_gradients(
    form: str, operands: Operands, options: LossOptions, group: Any = LOCAL, factor: float = 1.0
) -> list[Tensor]:
    """Loss, d hidden, d weight of factor * sum(row_weight * loss)."""
    hidden, weight, labels, row_weight = operands
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    total, loss = total_and_loss(form, (hidden, weight, labels, row_weight), options, group)
    grads = torch.autograd.grad(total * factor, [hidden, weight])
    return [loss.detach(), *grads]


@both_forms
@PROPERTY
@given(
    rows=st.integers(0, 13),
    chunk_rows=st.integers(1, 15),
    valid=st.integers(2, 11),
    padding=st.integers(0, 4),
    excluded=st.integers(-1, 10),
    seed=st.integers(0, 1000),
)
def test_loss_and_gradients_equal_the_dense_ones(
    form: str, rows: int, chunk_rows: int, valid: int, padding: int, excluded: int, seed: int
) -> None:
    options = LossOptions(
        vocab_start=0, num_valid_vocab=valid, excluded_id=excluded, chunk_rows=chunk_rows
    )
    operands = make_case(rows, 5, valid + padding, options, torch.float64, seed)
    got = with_gradients(form, operands, options, factor=3.0)
    want = with_gradients("dense", operands, options, factor=3.0)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    dead = [*range(valid, valid + padding), *([excluded] if 0 <= excluded < valid else [])]
    assert (got[2][dead] == 0).all()


@both_forms
def test_pieces_and_blocks_of_the_vocabulary_do_not_show(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_bp.objectives.head.PIECE", 6)
    monkeypatch.setattr("megatron_bp.objectives.passes.BLOCK", 3)
    for vocab, valid, excluded in ((20, 20, 7), (18, 11, -1)):  # a dead block, a dead piece
        options = LossOptions(
            vocab_start=0, num_valid_vocab=valid, excluded_id=excluded, chunk_rows=4
        )
        operands = make_case(9, 5, vocab, options, torch.float64)
        got = with_gradients(form, operands, options)
        for a, b in zip(got, with_gradients("dense", operands, options), strict=True):
            torch.testing.assert_close(a, b, **EXACT)


def test_gradients_pass_gradcheck_across_a_chunk_boundary() -> None:
    options = LossOptions(vocab_start=0, num_valid_vocab=7, excluded_id=2, chunk_rows=2)
    hidden, weight, labels, _ = make_case(5, 3, 8, options, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, labels, options=options),
        (hidden.requires_grad_(), weight.requires_grad_()),
    )


@both_forms
def test_large_logits_neither_overflow_nor_lose_the_loss(form: str) -> None:
    options = LossOptions(vocab_start=0, num_valid_vocab=6, chunk_rows=2)
    hidden, *rest = make_case(5, 4, 6, options, torch.float64)
    operands = (hidden * 1e4, *rest)
    got = with_gradients(form, operands, options)
    want = with_gradients("dense", operands, options)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-8)  # atol: logits of 1e4 * fp64 eps


@both_forms
def test_low_precision_inputs_are_accumulated_in_float32_and_rounded_once(form: str) -> None:
    # Against fp64 on the same bf16 numbers: the loss carries float32 rounding, a gradient is off
    # by at most one rounding to bf16 (2**-8 of its size). Accumulating 64 chunks in bf16 would be
    # off by several of those.
    options = LossOptions(vocab_start=0, num_valid_vocab=12, chunk_rows=4)
    hidden, weight, *rest = make_case(256, 16, 12, options, torch.bfloat16)
    got = with_gradients(form, (hidden, weight, *rest), options)
    want = with_gradients("dense", (hidden.double(), weight.double(), *rest), options)
    assert [tensor.dtype for tensor in got] == [torch.float32, torch.bfloat16, torch.bfloat16]
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2**-7.99, atol=1e-5)


def test_a_narrow_gradient_lies_in_the_memory_of_its_sum_and_is_rounded_once() -> None:
    # 3 * 2**20 + 1 numbers: pieces that overlap their sources would show as wrong numbers
    total = torch.randn(3 << 20 | 1, 1, generator=torch.Generator().manual_seed(0))
    want, memory = (total * 0.7).bfloat16(), total.untyped_storage().data_ptr()
    got = scaled(total, torch.tensor(0.7), torch.bfloat16)
    assert got.untyped_storage().data_ptr() == memory
    assert got.shape == want.shape
    assert torch.equal(got, want)


@both_forms
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_input_gets_no_gradient_and_the_other_the_same_one(form: str, frozen: str) -> None:
    options = LossOptions(vocab_start=0, num_valid_vocab=7, chunk_rows=2)
    operands = make_case(5, 3, 8, options, torch.float64)
    hidden, weight, *_ = operands
    _, dhidden, dweight = with_gradients("dense", operands, options)
    hidden.requires_grad_(frozen != "hidden")
    weight.requires_grad_(frozen != "weight")
    total_and_loss(form, operands, options)[0].backward()
    leaf, other, want = (
        (hidden, weight, dweight) if frozen == "hidden" else (weight, hidden, dhidden)
    )
    assert leaf.grad is None
    torch.testing.assert_close(other.grad, want, **EXACT)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.num_elements = max([self.num_elements, *sizes])
        return result


@both_forms
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_no_tensor_of_rows_times_vocabulary_is_ever_made(form: str, dtype: torch.dtype) -> None:
    rows, size, vocab, chunk_rows = 96, 4, 80, 5
    options = LossOptions(vocab_start=0, num_valid_vocab=vocab, chunk_rows=chunk_rows)
    operands = make_case(rows, size, vocab, options, dtype)
    operands[0].requires_grad_()
    operands[1].requires_grad_()
    with LargestTensor() as forward:
        total, _ = total_and_loss(form, operands, options)
    # A mode does not reach the autograd thread of another device, but on CPU it is this thread.
    with LargestTensor() as backward:
        total.backward()
    limit = max(chunk_rows * vocab, rows * size, vocab * size)
    assert chunk_rows * vocab <= forward.num_elements <= limit
    least = {"recomputed": chunk_rows * vocab, "in_forward": 0}[form]
    assert least <= backward.num_elements <= limit


def test_forward_keeps_its_inputs_and_one_number_a_row() -> None:
    options = LossOptions(vocab_start=0, num_valid_vocab=80, chunk_rows=5)
    hidden, weight, labels, _ = make_case(96, 4, 80, options, torch.float32)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x), x)[1], lambda x: x):
        linear_cross_entropy(hidden.requires_grad_(), weight, labels, options=options)
    assert sum(tensor.numel() for tensor in saved) == 96 * 4 + 80 * 4 + 96 + 96


def test_gradients_made_in_forward_serve_one_backward() -> None:
    options = LossOptions(vocab_start=0, num_valid_vocab=7, chunk_rows=2)
    hidden, *rest = make_case(5, 3, 8, options, torch.float64)
    total, loss = weighted_cross_entropy(hidden.requires_grad_(), *rest, options=options)
    assert not loss.requires_grad
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_without_a_gradient_to_compute_no_gradient_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = LossOptions(vocab_start=0, num_valid_vocab=8, chunk_rows=2)
    hidden, weight, labels, row_weight = make_case(6, 4, 8, options, torch.float64)
    want = linear_cross_entropy(hidden, weight, labels, options=options)
    monkeypatch.delattr("megatron_bp.objectives.passes.rescale_shares")
    with torch.no_grad():
        total, loss = weighted_cross_entropy(
            hidden.requires_grad_(), weight.requires_grad_(), labels, row_weight, options=options
        )
    torch.testing.assert_close(loss, want, **EXACT)
    torch.testing.assert_close(total, want @ row_weight, **EXACT)
    with pytest.raises(AttributeError, match="rescale_shares"):
        weighted_cross_entropy(hidden, weight, labels, row_weight, options=options)


def test_row_weights_that_do_not_fit_and_float16_are_refused() -> None:
    options = LossOptions(vocab_start=0, num_valid_vocab=7)
    hidden, weight, labels, row_weight = make_case(4, 3, 8, options, torch.float64)
    for wrong in (row_weight[:2], row_weight.clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"must be a constant of shape \[4\]"):
            weighted_cross_entropy(hidden, weight, labels, wrong, options=options)
    with pytest.raises(TypeError, match=r"would vanish. Use torch\.bfloat16"):
        weighted_cross_entropy(hidden.half(), weight.half(), labels, row_weight, options=options)


@pytest.mark.parametrize("label", [-1, 7, 9, 2])
def test_labels_that_do_not_count_are_refused(label: int) -> None:
    options = LossOptions(vocab_start=0, num_valid_vocab=7, excluded_id=2)
    hidden, weight, labels, _ = make_case(4, 3, 8, options, torch.float64)
    labels[3] = label
    with pytest.raises(ValueError, match=f"label of row 3 is {label}; .* excluded_id=2"):
        linear_cross_entropy(hidden, weight, labels, options=options)


def test_options_and_inputs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk_rows=0 must be at least 1"):
        LossOptions(vocab_start=0, num_valid_vocab=7, chunk_rows=0)
    with pytest.raises(ValueError, match="excluded_id=-2 must be a token id, or -1"):
        LossOptions(vocab_start=0, num_valid_vocab=7, excluded_id=-2)
    options = LossOptions(vocab_start=0, num_valid_vocab=7)
    hidden, weight, labels, _ = make_case(4, 3, 8, options, torch.float64)
    with pytest.raises(ValueError, match=r"must have the shapes \[R, E\], \[V, E\] and \[R\]"):
        linear_cross_entropy(hidden, weight, labels[:2], options=options)
    with pytest.raises(ValueError, match="rows of the size 3"):
        linear_cross_entropy(hidden, weight[:, :2], labels, options=options)
    with pytest.raises(TypeError, match="must have the same floating-point type"):
        linear_cross_entropy(hidden, weight.float(), labels, options=options)
    with pytest.raises(TypeError, match=r"they must be torch\.int64"):
        linear_cross_entropy(hidden, weight, labels.int(), options=options)


# Each row: vocabulary rows of the two ranks, ids that count, excluded id, target rows.
SPLITS = [
    (6, 6, 12, -1, 7),  # even
    (6, 6, 9, 4, 7),  # the second shard ends in padding; the first holds the excluded id
    (8, 8, 8, 3, 7),  # the second shard is wholly padding
    (8, 8, 5, -1, 7),  # ... and the first partly
    (5, 7, 11, 6, 7),  # uneven, excluded id in the second
    (6, 6, 12, -1, 0),  # no target rows
]


def split_over_two_ranks(rank: int, world_size: int) -> list[list[Tensor]]:
    results = []
    for form, (first, second, valid, excluded, rows) in product(FORMS, SPLITS):
        lo, hi = ((0, first), (first, first + second))[rank]
        options = LossOptions(
            vocab_start=lo, num_valid_vocab=valid, excluded_id=excluded, chunk_rows=3
        )
        hidden, weight, *rest = make_case(rows, 5, first + second, options, torch.float64)
        operands = (hidden, weight[lo:hi], *rest)
        results.append(with_gradients(form, operands, options, dist.group.WORLD))
    return results


def test_two_ranks_that_split_the_vocabulary_equal_one_process() -> None:
    # Only a real group shows that both ranks issue matching collectives on every split.
    ranks = run_distributed(split_over_two_ranks, 2)
    for index, (form, split) in enumerate(product(FORMS, SPLITS)):
        first, second, valid, excluded, rows = split
        options = LossOptions(
            vocab_start=0, num_valid_vocab=valid, excluded_id=excluded, chunk_rows=3
        )
        operands = make_case(rows, 5, first + second, options, torch.float64)
        loss, dhidden, dweight = with_gradients(form, operands, options)
        for rank in range(2):
            torch.testing.assert_close(ranks[rank][index][0], loss, **EXACT)
            torch.testing.assert_close(ranks[rank][index][1], dhidden, **EXACT)
        got = torch.cat([ranks[0][index][2], ranks[1][index][2]])
        torch.testing.assert_close(got, dweight, **EXACT)
        assert (got[valid:] == 0).all()
