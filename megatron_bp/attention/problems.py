"""How rows and key runs of a step become kernel inputs, and how results come back.

Inputs are views wherever rows lie together. Letters: T local rows, S key rows, Z samples, X
problems, Q rows and K keys of a problem, N query heads, M key/value heads, G = N / M, H head size.
Specified by tests/attention/test_native.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_bp.attention.passes import FEW_RUNS, add_rows, read_problems, read_rows
from megatron_bp.attention.schedule import Runs, Step


class KeyValue(NamedTuple):
    """Keys and values (or their gradients) of one key space: two tensors [S, Z, M, H]."""

    k: Tensor
    v: Tensor


Spaces = tuple[KeyValue, ...]  # indexed by KeySpace: clean, own, and the shard if a pass has it


def add_pieces(into: KeyValue, runs: Runs, dk_XKZMH: Tensor, dv_XKZMH: Tensor) -> None:
    """Adds the gradients of a step's or group's runs to their rows."""
    for lo, piece in runs.pieces or ((0, runs),):
        part = slice(lo, lo + piece.length)
        add_rows(tuple(into), piece, (dk_XKZMH[:, part], dv_XKZMH[:, part]))


@dataclass(frozen=True)
class Problems:
    """How one step is laid out for a kernel."""

    step: Step
    num_kv_heads: int

    def query(self, x_TZNH: Tensor) -> Tensor:
        """Query-shaped rows as [problems, Q, heads, H]."""
        if not self.step.joined and not self.step.folded:
            return read_problems(x_TZNH, self.step.rows)
        x = read_rows(x_TZNH, self.step.rows)  # [X, Q, Z, N, H]
        if self.step.joined:
            # torch.cat copies a few long runs at full bandwidth, flatten does not.
            apart = self.step.rows.step > self.step.rows.length and len(x) <= FEW_RUNS
            return (torch.cat([*x]) if apart else x.flatten(0, 1)).transpose(0, 1)
        x = x.unflatten(3, (self.num_kv_heads, -1)).permute(2, 1, 3, 0, 4, 5)
        return x.flatten(2, 4)

    def lse(self, x_TZN: Tensor) -> Tensor:
        """LSE rows as the kernel has them, [problems, heads, Q]."""
        if self.step.joined or self.step.folded:
            return self.query(x_TZN[..., None])[..., 0].transpose(1, 2)
        return read_problems(x_TZN, self.step.rows).transpose(1, 2)

    def unquery(self, x: Tensor, num_samples: int) -> Tensor:
        """The inverse of `query`, a view: [problems, Q, heads, H] as [X, Q, Z, M, G, H]."""
        problems = self.step.rows.num_problems
        if self.step.joined:
            x = x.transpose(0, 1).unflatten(0, (problems, -1))
            return x.unflatten(3, (self.num_kv_heads, -1))
        if self.step.folded:
            x = x.unflatten(2, (self.num_kv_heads, problems, -1))
            return x.permute(3, 1, 0, 2, 4, 5)
        x = x.unflatten(2, (self.num_kv_heads, -1))
        return x.unflatten(0, (-1, num_samples)).transpose(1, 2)

    def add_query(self, dq_TZNH: Tensor, part: Tensor) -> None:
        """Adds query gradients [problems, Q, heads, H] to their rows."""
        rows = dq_TZNH.unflatten(2, (self.num_kv_heads, -1)).flatten(-2)
        value = self.unquery(part, dq_TZNH.shape[1]).flatten(-2)
        add_rows((rows,), self.step.rows, (value,))

    def key(self, spaces: Spaces, part: int) -> Tensor:
        """Keys (part 0) or values (part 1) as [problems, K, M, H]."""
        found = [read_problems(spaces[space][part], runs) for space, runs in self.step.keys]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def add_keys(self, spaces: Spaces, dk_XKZMH: Tensor, dv_XKZMH: Tensor) -> None:
        """Adds key and value gradients to their rows."""
        at = 0
        for space, runs in self.step.keys:
            part = slice(at, at + runs.length)
            add_pieces(spaces[space], runs, dk_XKZMH[:, part], dv_XKZMH[:, part])
            at += runs.length

    @property
    def in_place(self) -> bool:
        """Whether the rows are a view that may be written."""
        return self.step.rows.writable and not self.step.folded

    def kernel_may_write(self, num_samples: int) -> bool:
        """Whether `query` and `lse` of fresh rows are views as a kernel takes them."""
        rows = self.step.rows
        one = rows.num_problems == 1 or (num_samples == 1 and not self.step.joined)
        return rows.store and self.in_place and one and rows.length > 1
