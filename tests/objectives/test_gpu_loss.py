"""The loss on CUDA: products of low-precision operands into float32, and the Triton passes.

Only CUDA multiplies low-precision operands into float32; there the gradient of the logits is
rounded to the operands' type before its products, logits and sums are not.
"""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.objectives import LossOptions
from megatron_bp.objectives.head import PIECE
from tests.distributed import run_distributed
from tests.objectives import test_loss as cpu
from tests.objectives import test_passes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# form, type: gradients computed in forward refuse float16
CASES = [
    ("recomputed", torch.float64),
    ("recomputed", torch.float32),
    ("recomputed", torch.float16),
    ("recomputed", torch.bfloat16),
    ("in_forward", torch.float64),
    ("in_forward", torch.float32),
    ("in_forward", torch.bfloat16),
]


def test_triton_passes_equal_their_formulas() -> None:
    test_passes.check_all("cuda")


@pytest.mark.parametrize(("form", "dtype"), CASES)
def test_loss_and_gradients_equal_the_dense_ones_in_float64(form: str, dtype: torch.dtype) -> None:
    # two chunks, two pieces of the vocabulary, six blocks; ragged ends everywhere
    options = LossOptions(vocab_start=0, num_valid_vocab=21000, excluded_id=3, chunk_rows=300)
    hidden, weight, labels, row_weight = cpu.make_case(500, 64, 21010, options, dtype)
    weight = weight / 8
    operands = (hidden, weight, labels, row_weight)
    got = cpu.with_gradients(form, tuple(x.cuda() for x in operands), options, factor=0.7)
    want = cpu.with_gradients(
        "dense", (hidden.double(), weight.double(), labels, row_weight), options, factor=0.7
    )
    exact = dtype == torch.float64
    loss_limit = 1e-12 if exact else 1e-5
    torch.testing.assert_close(got[0].cpu().double(), want[0], rtol=loss_limit, atol=loss_limit)
    # relative L2: one rounding of the logits' gradient (errors average out over a sum), one or two
    # of the result, each at most half a unit and 0.3 of one on average
    limit = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, torch.finfo(dtype).eps * 0.5)
    for a, b in zip(got[1:], want[1:], strict=True):
        assert a.dtype == dtype
        assert (a.cpu().double() - b).norm() / b.norm() < limit
    assert (got[2][21000:] == 0).all()
    assert (got[2][3] == 0).all()


@pytest.mark.parametrize("form", cpu.FORMS)
def test_repeats_are_bit_identical_whatever_memory_held(form: str) -> None:
    options = LossOptions(vocab_start=0, num_valid_vocab=4990, excluded_id=3, chunk_rows=300)
    operands = tuple(x.cuda() for x in cpu.make_case(500, 64, 5000, options, torch.bfloat16))
    want = cpu.with_gradients(form, operands, options)
    for _ in range(20):
        poison = [torch.full((n,), float("nan"), device="cuda") for n in (320_000, 2_000_000)]
        del poison  # freed blocks are what the loss gets
        got = cpu.with_gradients(form, operands, options)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("form", cpu.FORMS)
def test_memory_beside_gradients_is_one_chunk_and_half_the_float32_sum(form: str) -> None:
    rows, size, vocab, chunk_rows = 4096, 256, 40960, 768
    options = LossOptions(vocab_start=0, num_valid_vocab=vocab, chunk_rows=chunk_rows)
    operands = tuple(x.cuda() for x in cpu.make_case(rows, size, vocab, options, torch.bfloat16))
    hidden, weight = operands[0].requires_grad_(), operands[1].requires_grad_()
    for _ in range(2):  # the first call also allocates the matrix library's workspace
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        cpu.total_and_loss(form, operands, options)[0].backward()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = 2 * (rows + vocab) * size
    float32_sum = 2 * vocab * size  # beyond its bfloat16 half, which is the gradient
    chunk = chunk_rows * (2 * vocab + 4 * PIECE)
    small = 4 * chunk_rows * size + (4 << 20) + 100 * rows  # 4 MiB: first piece of the rounding
    assert peak < gradients + float32_sum + chunk + small


SPLIT = LossOptions(vocab_start=0, num_valid_vocab=21000, excluded_id=3, chunk_rows=300)
SHARD = 10505  # of 21,010 vocabulary rows


def split_over_two_ranks(rank: int, world_size: int, device: str) -> list[list[Tensor]]:
    hidden, weight, *rest = cpu.make_case(500, 64, 2 * SHARD, SPLIT, torch.bfloat16)
    shard = weight[rank * SHARD : (rank + 1) * SHARD] / 8
    operands = tuple(x.to(device) for x in (hidden, shard, *rest))
    options = replace(SPLIT, vocab_start=rank * SHARD)
    results = (cpu.with_gradients(f, operands, options, dist.group.WORLD) for f in cpu.FORMS)
    return [[x.cpu() for x in result] for result in results]


def check_two_ranks(device: str) -> None:
    """Two ranks with half the vocabulary each against one process with all of it, in bfloat16."""
    ranks = run_distributed(split_over_two_ranks, 2, device)
    hidden, weight, *rest = cpu.make_case(500, 64, 2 * SHARD, SPLIT, torch.bfloat16)
    operands = tuple(x.to(device) for x in (hidden, weight / 8, *rest))
    for first, second, form in zip(*ranks, cpu.FORMS, strict=True):
        loss, dhidden, dweight = (x.cpu() for x in cpu.with_gradients(form, operands, SPLIT))
        assert torch.equal(first[1], second[1])
        torch.testing.assert_close(first[0], loss, rtol=1e-5, atol=1e-5)
        # both sides carry roundings to bfloat16, of sums in another order
        for got, want in ((first[1], dhidden), (torch.cat([first[2], second[2]]), dweight)):
            assert (got.double() - want.double()).norm() / want.double().norm() < 2**-8


def test_two_ranks_on_one_gpu_equal_one_process() -> None:
    check_two_ranks("cuda")
