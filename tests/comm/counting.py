"""Counts what a rank sends, at the calls of torch.distributed, by the rules of layout/cost.py.

A "node" is a run of `ranks_per_node` global ranks; bytes between nodes are those for ranks on
another one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Sent:
    """One collective: the group's global ranks, and bytes to its ranks inside and between nodes."""

    ranks: tuple[int, ...]
    inside: int
    between: int

    @property
    def total(self) -> int:
        """All bytes that this rank sent."""
        return self.inside + self.between


def _to_each(tensor: torch.Tensor, nbytes: int, group: Any) -> list[int]:
    """The same bytes to every rank but oneself."""
    return [0 if peer == group.rank() else nbytes for peer in range(group.size())]


def _gather(out: torch.Tensor, tensor: torch.Tensor, *, group: Any) -> list[int]:
    assert out.nbytes == tensor.nbytes * group.size()
    return _to_each(tensor, tensor.nbytes, group)


def _scatter(out: torch.Tensor, tensor: torch.Tensor, *, group: Any) -> list[int]:
    assert tensor.nbytes == out.nbytes * group.size()
    return _to_each(tensor, out.nbytes, group)


def _exchange(
    out: torch.Tensor, tensor: torch.Tensor, receive: list[int], send: list[int], *, group: Any
) -> list[int]:
    assert (len(out), len(tensor)) == (sum(receive), sum(send))
    row_bytes = tensor[:1].nbytes if len(tensor) else 0
    return [0 if peer == group.rank() else row_bytes * rows for peer, rows in enumerate(send)]


_RULES: dict[str, Callable[..., list[int]]] = {
    "all_gather_into_tensor": _gather,
    "reduce_scatter_tensor": _scatter,
    "all_to_all_single": _exchange,
}
_COLLECTIVES = {
    *_RULES, "all_gather", "all_gather_object", "all_reduce", "all_to_all", "batch_isend_irecv",
    "broadcast", "gather", "irecv", "isend", "recv", "reduce", "reduce_scatter", "scatter", "send",
}  # fmt: skip


@contextmanager
def counted(ranks_per_node: int = 1 << 30, caller: str = "") -> Iterator[list[Sent]]:
    """What this rank sends while the context lasts, in calls from modules that start with `caller`.

    Calls that are not counted are errors there; calls from elsewhere pass.
    """
    sent: list[Sent] = []
    # torch compares these two by identity, so elsewhere they must stay what they are.
    names = _COLLECTIVES - {"isend", "irecv"} if caller else _COLLECTIVES
    originals = {name: getattr(dist, name) for name in names}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_globals["__name__"].startswith(caller):
                assert name in _RULES, f"torch.distributed.{name} is not counted by this test"
                group = kwargs["group"]
                ranks = tuple(dist.get_process_group_ranks(group))
                peers = _RULES[name](*args, group=group, **_without(kwargs))
                node = dist.get_rank() // ranks_per_node
                inside = [rank // ranks_per_node == node for rank in ranks]
                near = sum(n for n, here in zip(peers, inside, strict=True) if here)
                sent.append(Sent(ranks, near, sum(peers) - near))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, wrap(name))
    try:
        yield sent
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def _without(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k not in ("group", "async_op", "op")}
