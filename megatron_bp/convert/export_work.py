"""The jobs of a conversion to Hugging Face: each writes one safetensors file.

Every job can run in any process. Specified by tests/convert/test_round_trip.py and test_jobs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_bp.convert.link import Link, TensorInfo
from megatron_bp.convert.megatron_model import Stored, iter_link_rows
from megatron_bp.convert.pass_through import NoTensors, restore_original
from megatron_bp.convert.rules import clip
from megatron_bp.convert.safetensors_io import SafetensorsDir, Shard, ShardWriter
from megatron_bp.convert.torch_dist_io import TorchDistReader


@dataclass(frozen=True)
class ExportWork:
    """One job a shard. `written_names` maps a repository's tensor name to those to write.

    `zeros` are tensors that no checkpoint has.
    """

    reader: TorchDistReader
    links: tuple[tuple[Link, Stored], ...]
    kept: SafetensorsDir | NoTensors
    shards: tuple[Shard, ...]
    written_names: Mapping[str, tuple[str, ...]]
    zeros: Mapping[str, TensorInfo]
    directory: Path
    check_finite: bool

    def names(self) -> list[str]:
        """Returns a name for every job, in order."""
        return [shard.name for shard in self.shards]

    def order(self) -> list[int]:
        """Returns the jobs in order."""
        return list(range(len(self.shards)))

    def num_bytes(self, job: int) -> int:
        """Returns the size of the shard."""
        return self.shards[job].num_bytes

    def run(self, job: int, advance: Callable[[int], None]) -> None:
        """Writes one shard."""
        shard = self.shards[job]
        made = {name for link, _ in self.links for name in link.sources}
        with ShardWriter(self.directory, shard) as writer:
            for link, stored in self.links:
                mine = {name: self._mine(name, shard) for name in link.sources}
                if any(mine.values()):
                    self._write_link(link, stored, writer, mine, advance)
            for name in self.kept.tensors:
                for written in () if name in made else self._mine(name, shard):
                    assert isinstance(self.kept, SafetensorsDir)
                    for lo, rows in self.kept.iter_rows(name):
                        writer.write_rows(written, lo, rows)
                        advance(rows.nbytes)
            for name in self.zeros.keys() & shard.tensors.keys():
                info = self.zeros[name]
                writer.write_rows(name, 0, torch.zeros(info.shape, dtype=info.dtype))
                advance(info.num_bytes)

    def _mine(self, name: str, shard: Shard) -> tuple[str, ...]:
        return tuple(x for x in self.written_names.get(name, ()) if x in shard.tensors)

    def _write_link(
        self,
        link: Link,
        stored: Stored,
        writer: ShardWriter,
        mine: Mapping[str, tuple[str, ...]],
        advance: Callable[[int], None],
    ) -> None:
        for lo, rows in iter_link_rows(self.reader, link, stored):
            for piece in clip(link.pieces, lo, lo + rows.shape[0]):
                name = link.sources[piece.source]
                part = rows[piece.target_lo - lo :][: piece.rows]
                if link.needs_original and mine[name] and isinstance(self.kept, SafetensorsDir):
                    original = torch.empty(part.shape, dtype=self.kept.tensors[name].dtype)
                    self.kept.read_rows_into(name, piece.source_lo, original)
                    part = restore_original(part, original, link.offset)
                for written in mine[name]:
                    cast = part.to(writer.info(written).dtype)
                    if self.check_finite:
                        _check_finite(cast, stored.key, name)
                    writer.write_rows(written, piece.source_lo, cast)
                    advance(cast.nbytes)


def _check_finite(part: torch.Tensor, key: str, name: str) -> None:
    if not part.isfinite().all():
        raise ValueError(
            f"{key} (for {name}) has NaN or infinite values as {part.dtype}; export an earlier "
            f"--iteration, or leave --check-finite out"
        )
