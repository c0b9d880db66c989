"""Measures an implementation of the mean vocabulary loss: time, memory, errors; and its products.

Knows no implementation: they come as functions. Specified by tests/objectives/test_bench.py; the
command line is tools/bench_loss.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ROWS = 2048  # of float64 logits that exist at a time


@dataclass(frozen=True, eq=False)
class Problem:
    """A head, target rows and labels, and float64 results on the same numbers.

    Errors are taken over the first `sample` rows of each gradient, each summed over the whole
    problem.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    sample: int = 256

    @cached_property
    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean loss, d hidden and d weight in float64."""
        hidden, weight, labels = self.hidden.detach(), self.weight.detach().double(), self.labels
        few = torch.arange(min(self.sample, len(weight)), device=weight.device)
        loss = weight.new_zeros(())
        dhidden: list[Tensor] = []
        dweight = torch.zeros_like(weight[few])
        for h, label in zip(hidden.split(ROWS), labels[:, None].split(ROWS), strict=True):
            z = h.double() @ weight.t()
            lse = z.logsumexp(1, keepdim=True)
            loss += (lse - z.gather(1, label)).sum()
            dweight += ((z[:, few] - lse).exp() - (label == few).double()).t() @ h.double()
            left = self.sample - sum(len(d) for d in dhidden)
            if left > 0:
                p = (z[:left] - lse[:left]).exp()
                p.scatter_add_(1, label[:left], torch.full_like(p[:, :1], -1.0))
                dhidden.append(p @ weight)
        num_rows = len(labels)
        return loss / num_rows, torch.cat(dhidden) / num_rows, dweight / num_rows

    def errors(self, mean_loss: Callable[[], Tensor]) -> list[float]:
        """Relative L2 errors of loss, d hidden and d weight."""
        self.drop_gradients()
        loss = mean_loss()
        loss.backward()
        assert self.hidden.grad is not None, "hidden must require a gradient"
        assert self.weight.grad is not None, "weight must require a gradient"
        got = (loss.detach(), self.hidden.grad[: self.sample], self.weight.grad[: self.sample])
        pairs = zip(got, self.reference, strict=True)
        found = [float((a.double() - b).norm() / b.norm()) for a, b in pairs]
        self.drop_gradients()
        return found

    def drop_gradients(self) -> None:
        """Frees both gradients."""
        self.hidden.grad = self.weight.grad = None

    def peak_extra_bytes(self, mean_loss: Callable[[], Tensor]) -> int:
        """What forward and backward allocate at most, beyond inputs and gradients in their types.

        A float32 sum that becomes a bfloat16 gradient in place counts with its second half.
        """
        mean_loss().backward()  # the first run also allocates the libraries' workspaces
        self.drop_gradients()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        gradients = sum(x.numel() * x.element_size() for x in (self.hidden, self.weight))
        before = torch.cuda.memory_allocated() + gradients
        mean_loss().backward()
        peak = torch.cuda.max_memory_allocated() - before
        self.drop_gradients()
        return peak

    def loss_ms(self, mean_loss: Callable[[], Tensor], repeats: int) -> list[float]:
        """Median times of forward, of backward, and of both."""
        state: dict[str, Tensor] = {}

        def forward() -> None:
            self.drop_gradients()
            state["loss"] = mean_loss()

        found = median_ms([forward, lambda: state.pop("loss").backward()], repeats)
        self.drop_gradients()
        return found

    def product_ms(self, repeats: int) -> list[float]:
        """Median times of logits, d hidden, d weight, and of the three, each as one product.

        On whole matrices, with results in the inputs' type and the real gradient of the logits:
        speed depends on the numbers.
        """
        hidden, weight, labels = self.hidden.detach(), self.weight.detach(), self.labels
        logits = hidden @ weight.t()
        dlogits, dhidden, dweight = map(torch.empty_like, (logits, hidden, weight))
        for z, d, label in zip(*(t.split(ROWS) for t in (logits, dlogits, labels)), strict=True):
            p = z.float().softmax(1)
            p.scatter_add_(1, label[:, None], torch.full_like(p[:, :1], -1.0))
            d.copy_(p / len(labels))
        return median_ms(
            [
                lambda: torch.mm(hidden, weight.t(), out=logits),
                lambda: torch.mm(dlogits, weight, out=dhidden),
                lambda: torch.mm(dlogits.t(), hidden, out=dweight),
            ],
            repeats,
        )


def make_problem(rows: int, hidden_size: int, vocab: int, device: str) -> Problem:
    """Random bfloat16 inputs; low ids are labels of many rows, high ones of few, as in text."""
    draw = torch.Generator(device).manual_seed(1)
    hidden = torch.randn(rows, hidden_size, generator=draw, device=device)
    weight = torch.randn(vocab, hidden_size, generator=draw, device=device) * 0.02
    labels = (vocab * torch.rand(rows, generator=draw, device=device) ** 4).long()
    return Problem(hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_(), labels)


def median_ms(steps: list[Callable[[], object]], repeats: int) -> list[float]:
    """Median time of each step of a sequence, and of the sequence, after one warm-up."""
    times = []
    for _ in range(repeats + 1):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]
        marks[0].record()
        for step, mark in zip(steps, marks[1:], strict=True):
            step()
            mark.record()
        marks[-1].synchronize()
        spans = zip([*marks[:-1], marks[0]], [*marks[1:], marks[-1]], strict=True)
        times.append([a.elapsed_time(b) for a, b in spans])
    return [sorted(column)[repeats // 2] for column in zip(*times[1:], strict=True)]
