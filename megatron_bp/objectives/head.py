"""The linear head of the loss: its logits and gradients, chunk by chunk over rows.

Owns the matrix products, their types and buffers, and the collectives of a vocabulary that is split
over ranks. Logits exist for a chunk of rows and a piece of the vocabulary at a time. Specified by
tests/objectives/test_loss.py and test_gpu_loss.py.

Shape letters: R target rows, C rows of one chunk, E hidden size, V vocabulary rows of this rank,
N of them in one piece, B blocks of columns (passes.py), P ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bp.objectives import passes

PIECE = 4 * passes.BLOCK  # columns whose logits exist at a time


class Local(Enum):
    """The absence of a process group: this process has the whole vocabulary."""

    LOCAL = "local"


LOCAL: Final = Local.LOCAL


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Which part of the vocabulary this rank holds, what of it counts, and the chunk size.

    `vocab_start` is the token id of the first local weight row. Ids from `num_valid_vocab` on are
    Megatron's padding: they get no probability and their weight rows a gradient of exactly zero.
    So does `excluded_id` (the mask token, -1 for none).

    Units: `chunk_rows` in rows of one product, the same on all ranks of a group. Memory holds
    chunk_rows * V numbers in the type of the operands. Each chunk reads and writes the float32 sum
    of the weight gradient once: small chunks cost speed. `labels_checked` says that `check_labels`
    passed already, when the device had nothing else to do.
    """

    vocab_start: int
    num_valid_vocab: int
    excluded_id: int = -1
    chunk_rows: int = 2048
    labels_checked: bool = False

    def __post_init__(self) -> None:
        for name, least in (("vocab_start", 0), ("num_valid_vocab", 1), ("chunk_rows", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}.")
        if self.excluded_id < -1:
            raise ValueError(f"excluded_id={self.excluded_id} must be a token id, or -1 for none.")


@dataclass(frozen=True, eq=False)
class Head:
    """The operands of one call, and how they are cut."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    options: LossOptions
    group: dist.ProcessGroup | Local

    @property
    def dtype(self) -> torch.dtype:
        """The compute type: of logits, losses and sums."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32

    @property
    def operand_dtype(self) -> torch.dtype:
        """Type of the products' operands: only CUDA multiplies low precision into float32."""
        return self.weight.dtype if self.weight.is_cuda else self.dtype

    @property
    def chunk_rows(self) -> int:
        """Rows of a buffer for one chunk."""
        return min(self.options.chunk_rows, len(self.labels))

    @cached_property
    def live(self) -> passes.Live:
        """This rank's columns that count."""
        start, size = self.options.vocab_start, len(self.weight)
        excluded = self.options.excluded_id - start
        return passes.Live(
            stop=min(max(self.options.num_valid_vocab - start, 0), size),
            excluded=excluded if self.options.excluded_id >= 0 and 0 <= excluded < size else -1,
        )

    @cached_property
    def column_R(self) -> Tensor:  # noqa: N802
        """Column of each label in this rank's vocabulary, -1 if elsewhere."""
        column_R = self.labels - self.options.vocab_start
        return column_R.where((column_R >= 0) & (column_R < len(self.weight)), -1)

    def chunks(self) -> Iterator[slice]:
        """The rows of each chunk."""
        return _cut(len(self.labels), self.options.chunk_rows)

    def multiply(self, total: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
        """total = a @ b, or total += a @ b, accumulated in the compute type."""
        beta = 1 if add else 0  # with 0, whatever `total` held is ignored
        if self.operand_dtype == self.dtype:
            torch.addmm(total, a.to(self.dtype), b.to(self.dtype), beta=beta, out=total)
        else:
            torch.addmm(total, a, b, out_dtype=self.dtype, beta=beta, out=total)

    def merge(self, lse_C: Tensor, picked_C: Tensor) -> tuple[Tensor, Tensor]:
        """Log-sum-exp over the whole vocabulary, and the label's logit, wherever it is."""
        if self.group is LOCAL or len(lse_C) == 0:
            return lse_C, picked_C
        mine_2C = torch.stack([lse_C, picked_C])
        all_2PC = mine_2C.new_empty(2 * self.group.size(), len(lse_C))
        dist.all_gather_into_tensor(all_2PC, mine_2C, group=self.group)
        return all_2PC[0::2].logsumexp(0), all_2PC[1::2].sum(0)


class Logits:
    """Buffers for the logits of one piece and, `with_gradient`, for that of a whole chunk."""

    def __init__(self, head: Head, *, with_gradient: bool) -> None:
        self.head = head
        rows, size = head.chunk_rows, len(head.weight)
        new = head.weight.new_empty
        # logits of the operands' own type are computed where their gradient will be
        self._in_place = with_gradient and head.operand_dtype == head.dtype
        self._piece_CN = new(rows, 0 if self._in_place else min(PIECE, size), dtype=head.dtype)
        self._dlogits_CV = new(rows, size if with_gradient else 0, dtype=head.operand_dtype)

    def statistics(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Log-sum-exp of each row's blocks, and its label's logit, 0 if that is elsewhere.

        `with_gradient`, the softmax of each block is left in the gradient's buffer.
        """
        head, num_rows = self.head, rows.stop - rows.start
        num_blocks = -(-len(head.weight) // passes.BLOCK)
        lse_CB = head.weight.new_empty(num_rows, num_blocks, dtype=head.dtype)
        picked_C = lse_CB.new_zeros(num_rows)
        for piece in _cut(len(head.weight), PIECE):
            logits_CN, share_CN = self._compute(rows, piece)
            blocks = slice(piece.start // passes.BLOCK, -(-piece.stop // passes.BLOCK))
            passes.write_statistics(
                lse_CB[:, blocks],
                picked_C,
                share_CN,
                logits_CN,
                head.column_R[rows],
                head.live,
                piece.start,
            )
        return lse_CB, picked_C

    def gradient(self, rows: slice, lse_C: Tensor, scale_C: Tensor) -> Tensor:
        """Gradient of the rows' logits, which are computed again."""
        head = self.head
        for piece in _cut(len(head.weight), PIECE):
            logits_CN, dlogits_CN = self._compute(rows, piece)
            passes.write_gradient(
                dlogits_CN,
                logits_CN,
                lse_C,
                head.column_R[rows],
                scale_C,
                head.live,
                piece.start,
            )
        return self._dlogits_CV[: rows.stop - rows.start]

    def gradient_of_statistics(
        self, rows: slice, lse_CB: Tensor, lse_C: Tensor, picked_C: Tensor, scale_C: Tensor
    ) -> Tensor:
        """Gradient of the rows' logits, from what `statistics` of them left."""
        dlogits_CV = self._dlogits_CV[: rows.stop - rows.start]
        passes.rescale_shares(
            dlogits_CV, lse_CB, lse_C, picked_C, self.head.column_R[rows], scale_C
        )
        return dlogits_CV

    def _compute(self, rows: slice, piece: slice) -> tuple[Tensor, Tensor]:
        """The logits of some rows and columns, and the place of their gradient."""
        num_rows = rows.stop - rows.start
        dlogits_CN = self._dlogits_CV[:num_rows, piece]
        logits_CN = self._piece_CN[:num_rows, : piece.stop - piece.start]
        if self._in_place:
            logits_CN = dlogits_CN
        head = self.head
        head.multiply(logits_CN, head.hidden[rows], head.weight[piece].t(), add=False)
        return logits_CN, dlogits_CN


def gradients(
    head: Head, needs: tuple[bool, ...], dlogits_of: Callable[[slice], Tensor]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradient of hidden in its own type, and of weight in the compute type, as far as needed.

    `dlogits_of` gives the gradient of the logits of a chunk's rows, in the operands' type.
    """
    hidden, weight = head.hidden, head.weight
    dhidden_RE = torch.empty_like(hidden) if needs[0] else None
    new = torch.empty_like if len(hidden) else torch.zeros_like
    dweight_VE = new(weight, dtype=head.dtype) if needs[1] else None
    part_CE = hidden.new_empty(head.chunk_rows, hidden.shape[1], dtype=head.dtype)
    one = part_CE.new_ones(())
    for rows in head.chunks():
        dlogits_CV = dlogits_of(rows)
        if dhidden_RE is not None:
            part = part_CE[: len(dlogits_CV)]
            head.multiply(part, dlogits_CV, weight, add=False)
            if head.group is not LOCAL:
                dist.all_reduce(part, group=head.group)
            passes.write_scaled(dhidden_RE[rows], part, one)
        if dweight_VE is not None:
            head.multiply(dweight_VE, dlogits_CV.t(), hidden[rows], add=rows.start > 0)
    return dhidden_RE, dweight_VE


def scaled(total: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """total * factor rounded to `dtype`, in the memory of `total`, which is lost.

    A narrower result lies in the first half. Piece [lo, hi) of it overwrites what an earlier piece
    was made of, if hi <= 2 * lo; the first piece goes through a copy.
    """
    if dtype == total.dtype:
        return total.mul_(factor)
    size = total.numel()
    wide = total.view(-1)
    narrow = wide[: (size + 1) // 2].view(dtype)[:size]
    lo, hi = 0, min(size, 1 << 20)
    while lo < size:
        piece = wide[lo:hi].clone() if lo == 0 else wide[lo:hi]
        passes.write_scaled(narrow[lo:hi], piece, factor)
        lo, hi = hi, min(size, 2 * hi)
    return narrow.view(total.shape)


def _cut(size: int, step: int) -> Iterator[slice]:
    for start in range(0, size, step):
        yield slice(start, min(start + step, size))
