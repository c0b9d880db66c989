"""Specifies megatron_bp.objectives.bench, apart from clocks and memory, which need a device."""

import torch
from torch.nn import functional

from megatron_bp.objectives import bench


def test_the_reference_is_the_float64_loss_and_its_gradients() -> None:
    x = bench.make_problem(bench.ROWS + 3, 4, 50, "cpu")  # two chunks
    x = bench.Problem(x.hidden, x.weight, x.labels, sample=7)
    hidden, weight = (t.detach().double().requires_grad_() for t in (x.hidden, x.weight))
    loss = functional.cross_entropy(hidden @ weight.t(), x.labels)
    dhidden, dweight = torch.autograd.grad(loss, [hidden, weight])
    for got, want in zip(x.reference, (loss.detach(), dhidden[:7], dweight[:7]), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)


def test_errors_are_relative_and_tell_the_three_results_apart() -> None:
    x = bench.make_problem(20, 4, 50, "cpu")

    def off_by_a_tenth_in_hidden() -> torch.Tensor:
        hidden = x.hidden.double() + 0.1 * (x.hidden.double() - x.hidden.detach().double())
        return functional.cross_entropy(hidden @ x.weight.double().t(), x.labels)

    loss, dhidden, dweight = x.errors(off_by_a_tenth_in_hidden)
    assert loss < 1e-12
    assert abs(dhidden - 0.1) < 0.005  # bfloat16 gradients
    assert dweight < 0.005
    assert x.hidden.grad is None
