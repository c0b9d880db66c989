"""A Megatron checkpoint of a known family, opened only if every entry is accounted for.

Training checkpoints add optimizer, RNG and rerun entries, padded vocabulary rows, tensor-parallel
chunks and usually the homogeneous layout; all of these are recognised by name, and anything else is
an error. Specified by tests/convert/test_export.py and test_megatron_load.py.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_bp.convert.families import read_model
from megatron_bp.convert.families.base import Family, ModelShape
from megatron_bp.convert.link import TOP, Link, TensorInfo
from megatron_bp.convert.megatron_args import RELEASE_NAME, TRACKER_NAME
from megatron_bp.convert.plan import (
    EMBEDDING_KEY,
    OUTPUT_KEY,
    PADDED_KEYS,
    Layout,
    check_coverage,
    link_key,
    make_links,
    megatron_shapes,
    source_of,
)
from megatron_bp.convert.torch_dist_io import TorchDistReader

LATEST = -1
# Written by the plain optimizer ("fp32_param") and by the distributed one in its fully reshardable
# format ("param").
_MASTER = re.compile(r"^(?:chained_\d+\.)?optimizer\.state\.(?:fp32_param|param)\.")
_NOT_MODEL = re.compile(
    r"^(chained_\d+\.)?optimizer\.|^rng_state(\.|/|$)|^rerun_state_machine_state(\.|/|$)"
    r"|^common_state/|^opt_param_scheduler(\.|/|$)|\._extra_state(/|$)"
)


def is_model_key(key: str) -> bool:
    """Tells model weights from optimizer, RNG, rerun, scheduler and extra-state entries."""
    return not _NOT_MODEL.search(key)


@dataclass(frozen=True)
class Stored:
    """Where the rows of a link are: the key that holds them, and the layer of a stacked key."""

    key: str
    layer: int
    info: TensorInfo


@dataclass(frozen=True)
class MegatronModel:
    """A checkpoint whose every model tensor is accounted for.

    `links` are those to read: of a tensor and its alias, the one that the checkpoint has. `masters`
    are the optimizer's fp32 copies by model key. `ignored` counts the entries that are no model
    weights.
    """

    family: Family
    shape: ModelShape
    links: tuple[Link, ...]
    layout: Layout
    reader: TorchDistReader
    masters: Mapping[str, str]
    ignored: int

    @property
    def is_drafter(self) -> bool:
        """Whether the model has no table of its own and lives beside another model's keys."""
        return not source_of(self.links, EMBEDDING_KEY)

    def stored(self, link: Link, *, master: bool = False) -> Stored:
        """Returns where the link's rows are; with `master`, in the optimizer if it has a copy."""
        layer = link.layer if self.layout is Layout.HOMOGENEOUS else -1
        key = link_key(link, self.layout)
        key = self.masters.get(key, key) if master else key
        return Stored(key, layer, self.reader.tensors[key])


def iter_link_rows(
    reader: TorchDistReader, link: Link, stored: Stored
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields (first row, rows) blocks of the link's tensor, as Hugging Face has the values."""
    inner = math.prod(link.shape[1 : link.row_dims])
    for lo, rows in reader.iter_rows(stored.key, stored.layer):
        rows = rows.reshape(-1, *link.row_shape)
        if link.offset:
            rows = (rows.double() - link.offset).to(rows.dtype)
        yield lo * inner, rows


def find_iteration(root: Path, iteration: int) -> Path:
    """Returns the directory of an iteration: `root` itself, or the one that the tracker file names.

    Raises: ValueError naming the path that is missing.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a directory; give a Megatron checkpoint folder")
    if (root / "metadata.json").is_file():
        return root
    if iteration == LATEST:
        tracker = root / TRACKER_NAME
        if not tracker.is_file():
            raise ValueError(
                f"{root} has neither {TRACKER_NAME} nor metadata.json; it is no Megatron checkpoint"
            )
        text = tracker.read_text().strip()
        name = RELEASE_NAME if text == RELEASE_NAME else f"iter_{int(text):07d}"
    else:
        name = f"iter_{iteration:07d}"
    if not (root / name).is_dir():
        have = ", ".join(sorted(path.name for path in root.glob("iter_*"))) or "no iterations"
        raise ValueError(f"{root} has no {name}; it has {have}")
    return root / name


def open_megatron_model(
    directory: Path, config: Mapping[str, Any], names: Collection[str] = ()
) -> MegatronModel:
    """Returns the model after checking that its tensors are exactly those `config` describes.

    `names` are the Hugging Face names to write, for families whose config leaves a choice.
    Raises: ValueError naming what is missing, left over or of another shape.
    """
    family, shape = read_model(config)
    reader = TorchDistReader(directory)
    shape = family.adapt(shape, names or _known_names(shape, reader))
    found = {key: info for key, info in reader.tensors.items() if is_model_key(key)}
    strange = sorted(key for key in reader.objects if is_model_key(key))
    if strange:
        raise ValueError(
            f"{directory} has {len(strange)} unknown objects: {', '.join(strange[:4])}"
        )
    every = make_links(family, shape)
    if not source_of(every, EMBEDDING_KEY):
        roots = tuple({link.name.split(".")[0] + "." for link in every if link.layer == TOP})
        found = {key: info for key, info in found.items() if key.startswith(roots)}
    layout = _find_layout(every, found)
    if shape.tied and OUTPUT_KEY in found and EMBEDDING_KEY in found:
        _check_tied_output(reader, shape.vocab_size)
        del found[OUTPUT_KEY]
    links = _present(reader, every, layout, found)
    left_out = {link_key(link, layout) for link in every} - {link_key(x, layout) for x in links}
    check_coverage(
        str(directory),
        megatron_shapes(links, layout, shape.num_layers),
        {key: info for key, info in found.items() if key not in left_out},
        PADDED_KEYS,
    )
    masters = {
        _MASTER.sub("", key): key
        for key, info in reader.tensors.items()
        if _MASTER.match(key) and info.dtype == torch.float32
    }
    ignored = len(reader.tensors) - len(found) + len(reader.objects)
    links += _repeated_head(links, shape, names)
    return MegatronModel(family, shape, links, layout, reader, masters, ignored)


def _known_names(shape: ModelShape, reader: TorchDistReader) -> tuple[str, ...]:
    # A checkpoint tells at least whether the head has a tensor of its own.
    return (shape.head_name,) if OUTPUT_KEY in reader.tensors else ()


def _find_layout(links: Sequence[Link], found: Mapping[str, TensorInfo]) -> Layout:
    in_layers = [link for link in links if link.layer == 0]
    hits = {layout: sum(link_key(x, layout) in found for x in in_layers) for layout in Layout}
    return max(Layout, key=lambda layout: hits[layout])


def _present(
    reader: TorchDistReader,
    links: Sequence[Link],
    layout: Layout,
    found: Mapping[str, TensorInfo],
) -> tuple[Link, ...]:
    """Returns the links without aliases, or with the alias where only that is in the checkpoint.

    Raises: ValueError when a checkpoint has both and they differ.
    """
    aliases = {(link.layer, link.sources, link.pieces): link for link in links if link.alias}
    chosen = []
    for link in links:
        alias = aliases.get((link.layer, link.sources, link.pieces), link)
        if link.alias:
            continue
        keys = [link_key(link, layout), link_key(alias, layout)]
        if alias is not link and all(key in found for key in keys):
            _check_same(reader, keys, link.layer if layout is Layout.HOMOGENEOUS else -1)
        chosen.append(alias if keys[0] not in found and keys[1] in found else link)
    return tuple(chosen)


def _check_same(reader: TorchDistReader, keys: Sequence[str], layer: int) -> None:
    """Raises: ValueError when a tensor and its second copy differ."""
    rows = [torch.cat([part for _, part in reader.iter_rows(key, layer)]) for key in keys]
    if rows[0].dtype != rows[1].dtype or not torch.equal(rows[0], rows[1]):
        raise ValueError(
            f"{reader.directory}: {keys[0]} and {keys[1]} are one tensor under two names, but "
            f"differ; remove the one that the model did not use"
        )


def _repeated_head(
    links: Sequence[Link], shape: ModelShape, names: Collection[str]
) -> tuple[Link, ...]:
    """Returns the head of a tied repository that stores it again, as a copy of the embedding."""
    if not (shape.tied and shape.head_name in names):
        return ()
    return tuple(
        replace(link, sources=(shape.head_name,)) for link in links if link.name == EMBEDDING_KEY
    )


def _check_tied_output(reader: TorchDistReader, vocab_size: int) -> None:
    digests = []
    for key in PADDED_KEYS:
        digest = hashlib.sha256()
        for lo, rows in reader.iter_rows(key):
            kept = rows[: max(0, vocab_size - lo)].contiguous()
            digest.update(memoryview(kept.reshape(-1).view(torch.uint8).numpy()))
        digests.append(digest.digest())
    if digests[0] != digests[1]:
        raise ValueError(
            f"config.json says tie_word_embeddings=true, but {OUTPUT_KEY} differs from "
            f"{EMBEDDING_KEY}; set tie_word_embeddings to false in the assets' config.json"
        )


def with_vocab_rows(model: MegatronModel, rows: int) -> MegatronModel:
    """Returns the model cut to the first `rows` vocabulary rows (for comparing before a resize)."""
    shape = replace(model.shape, vocab_size=rows)
    kept = {(link.layer, link.name) for link in model.links}
    links = make_links(model.family, shape)
    return replace(model, shape=shape, links=tuple(x for x in links if (x.layer, x.name) in kept))
