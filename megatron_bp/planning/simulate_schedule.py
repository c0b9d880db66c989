"""Orders the micro-batches of a pipeline stage: 1F1B, plain and interleaved.

Source: arXiv 2104.04473, section 2.2; Megatron-Core's schedules.py orders the same. Specified by
tests/planning/test_simulate_schedule.py.
"""

from dataclasses import dataclass
from typing import NamedTuple


class Turn(NamedTuple):
    """One forward or backward of one micro-batch through one model chunk of a stage."""

    forward: bool
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class Pipeline:
    """`stages` ranks deep, `chunks` model chunks a stage, `micro_batches` in a step.

    Raises: ValueError if interleaving does not divide.
    """

    stages: int
    chunks: int
    micro_batches: int

    def __post_init__(self) -> None:
        if self.chunks > 1 and self.micro_batches % self.stages:
            raise ValueError(
                f"{self.micro_batches} micro-batches must be a multiple of {self.stages} pipeline "
                f"stages with {self.chunks} chunks a stage; use "
                f"{-(-self.micro_batches // self.stages) * self.stages}."
            )

    def turns(self, stage: int) -> list[Turn]:
        """What a stage does, in order: forwards to warm up, one of each in turn, the rest."""
        total = self.micro_batches * self.chunks
        after = self.stages - 1 - stage
        warm_up = after if self.chunks == 1 else 2 * after + (self.chunks - 1) * self.stages
        warm_up = min(warm_up, total)
        forward = [self._turn(True, i) for i in range(total)]
        backward = [self._turn(False, i) for i in range(total)]
        order = forward[:warm_up]
        for i in range(total - warm_up):
            order += [forward[warm_up + i], backward[i]]
        return order + backward[total - warm_up :]

    def _turn(self, forward: bool, index: int) -> Turn:
        """Turn `index` of a direction: P micro-batches through a chunk, then the next chunk."""
        if self.chunks == 1:
            return Turn(forward, index, 0)
        group, place = divmod(index, self.stages * self.chunks)
        chunk, offset = divmod(place, self.stages)
        chunk = chunk if forward else self.chunks - 1 - chunk
        return Turn(forward, group * self.stages + offset, chunk)

    def before(self, stage: int, turn: Turn) -> tuple[int, Turn] | tuple[()]:
        """The stage and turn whose output this turn takes; nothing at the pipeline's ends."""
        step = -1 if turn.forward else 1
        place = turn.chunk * self.stages + stage + step
        if not 0 <= place < self.stages * self.chunks:
            return ()
        chunk, source = divmod(place, self.stages)
        return source, turn._replace(chunk=chunk)
