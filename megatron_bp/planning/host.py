"""Holds how long a CPU takes to start what a GPU computes, and where a GPU waits for its CPU.

Launches are queued, so a GPU that has work never waits: a layer takes as long as its kernels or as
its launches, whichever is longer. Where the CPU needs an answer of the GPU (which rows are targets,
the gradient norm, whether a sum is finite) the queue is empty afterwards, and the GPU waits for
what the CPU does next, however long its kernels are. Knows no model. Specified by
tests/planning/test_host.py.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_bp.layout.run_shape import Mode, Recompute, Run


@dataclass(frozen=True)
class HostTime:
    """What the CPU of one rank costs. Units: seconds; 0 for a CPU that costs nothing.

    To start one layer and micro-batch: `layer_forward`; `layer_again` (forward a second time, with
    attention kept); `layer_backward`; `exchange` (each that a layer of the context-parallel
    baseline has more, of corrupted keys or their gradients); and `head` with the loss. Waits with
    an empty queue: `micro_batch` (from its targets to the first layer, and from the loss to
    backward), `step` (gradient norm, optimizer, reports), `check` (each that Megatron makes for
    NaN: of the loss and of every bucket of gradients).
    """

    layer_forward: float = 0.0
    layer_again: float = 0.0
    layer_backward: float = 0.0
    exchange: float = 0.0
    head: float = 0.0
    micro_batch: float = 0.0
    step: float = 0.0
    check: float = 0.0

    def late_forward(self, seconds: float) -> float:
        """How much longer the launches of a layer's forward take than its kernels' `seconds`."""
        return max(0.0, self.layer_forward - seconds)

    def late_backward(self, kept: Recompute, seconds: float) -> float:
        """The same of backward, with what is computed again."""
        again = {
            Recompute.NONE: 0.0,
            Recompute.SELECTIVE: self.layer_again / 2,
            Recompute.FULL_KEEP_ATTENTION: self.layer_again,
            Recompute.FULL: self.layer_forward,
        }[kept]
        return max(0.0, again + self.layer_backward - seconds)

    def late_head(self, seconds: float) -> float:
        """The same of the head and the loss."""
        return max(0.0, self.head - seconds)

    def of(self, run: Run) -> "HostTime":
        """This for the layers of a run: in the baseline corrupted keys travel in forward, perhaps
        again for backward, and their gradients."""
        if run.topology.mode is not Mode.CP:
            return self
        policy = run.policy
        again = not policy.keep_gathered and policy.recompute is not Recompute.FULL
        return replace(
            self,
            layer_forward=self.layer_forward + self.exchange,
            layer_backward=self.layer_backward + (1 + again) * self.exchange,
        )

    def given(self, values: Any) -> "HostTime":
        """This with a user's numbers in place of its own: fields by name, or 0 to switch it off.

        Raises: ValueError for unknown fields, and for anything but numbers of at least 0.
        """
        if values == 0:
            return NO_HOST
        names = [field.name for field in fields(self)]
        if not isinstance(values, dict) or not set(values) <= set(names):
            raise ValueError(
                f"calibration field host={values!r} must be 0, or seconds by name for some of "
                f'{", ".join(names)}; use for example {{"layer_forward": 0.004}}.'
            )
        wrong = {k: v for k, v in values.items() if isinstance(v, bool) or not 0 <= float(v) < 1e3}
        if wrong:
            raise ValueError(f"calibration field host={wrong} must be seconds of at least 0.")
        return replace(self, **{name: float(value) for name, value in values.items()})


NO_HOST = HostTime()

# An "Intel Xeon" host (64 virtual CPUs, with four of its H200s), torch 2.11, Megatron-Core 0.19.2,
# Transformer Engine 2.20.2. Launches: commit 49f45a6, four ranks, steps of four and eight layers at
# L 2,048, where nothing else takes time (77.7 and 145.0 ms), split as timed calls of one rank; two
# ranks needed two thirds of that. An exchange: commit 557dc0c, what eight layers of the baseline at
# L 2,048 take longer than ours on two ranks (173.8 and 156.8 ms), by 24. Waits: commit 6931bc6,
# gaps in a profile at L 65,536, and steps at L 16,384 with and without checks, two ranks
# (docs/plan.md).
HOST_H200 = HostTime(
    layer_forward=5.8e-3,
    layer_again=3.7e-3,
    layer_backward=5.7e-3,
    exchange=0.7e-3,
    head=5.0e-3,
    micro_batch=3.0e-3,
    step=2.0e-3,
    check=1.1e-3,
)
