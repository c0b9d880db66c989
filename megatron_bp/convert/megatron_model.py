"""A Megatron checkpoint of a known family, opened only if every entry is accounted for.

Training checkpoints add optimizer, RNG and rerun entries, padded vocabulary rows, tensor-parallel
chunks and usually the homogeneous layout; all of these are recognised by name, and anything else is
an error. Specified by tests/convert/test_export.py and test_megatron_load.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_bp.convert.families import read_model
from megatron_bp.convert.families.base import Family, ModelShape
from megatron_bp.convert.link import Link, TensorInfo
from megatron_bp.convert.megatron_args import RELEASE_NAME, TRACKER_NAME
from megatron_bp.convert.plan import (
    PADDED_KEYS,
    Layout,
    check_coverage,
    link_key,
    make_links,
    megatron_shapes,
)
from megatron_bp.convert.torch_dist_io import TorchDistReader

LATEST = -1
_OUTPUT_KEY = "output_layer.weight"
_NOT_MODEL = re.compile(
    r"^(chained_\d+\.)?optimizer\.|^rng_state(\.|/|$)|^rerun_state_machine_state(\.|/|$)"
    r"|^common_state/|^opt_param_scheduler(\.|/|$)|\._extra_state(/|$)"
)


def is_model_key(key: str) -> bool:
    """Tells model weights from optimizer, RNG, rerun, scheduler and extra-state entries."""
    return not _NOT_MODEL.search(key)


@dataclass(frozen=True)
class MegatronModel:
    """A checkpoint whose every model tensor is accounted for.

    `ignored` counts the entries that are no model weights.
    """

    family: Family
    shape: ModelShape
    links: tuple[Link, ...]
    layout: Layout
    reader: TorchDistReader
    ignored: int

    def iter_rows(self, link: Link) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first row, rows) blocks of the link's tensor."""
        layer = link.layer if self.layout is Layout.HOMOGENEOUS else -1
        return self.reader.iter_rows(link_key(link, self.layout), layer)

    def info(self, link: Link) -> TensorInfo:
        """Returns the stored shape and dtype of the link's key."""
        return self.reader.tensors[link_key(link, self.layout)]


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


def open_megatron_model(directory: Path, config: Mapping[str, Any]) -> MegatronModel:
    """Returns the model after checking that its tensors are exactly those `config` describes.

    Raises: ValueError naming what is missing, left over or of another shape.
    """
    family, shape = read_model(config)
    reader = TorchDistReader(directory)
    found = {key: info for key, info in reader.tensors.items() if is_model_key(key)}
    strange = sorted(key for key in reader.objects if is_model_key(key))
    if strange:
        raise ValueError(
            f"{directory} has {len(strange)} unknown objects: {', '.join(strange[:4])}"
        )
    stacked = any(key.startswith("decoder.layers.self_attention.") for key in found)
    layout = Layout.HOMOGENEOUS if stacked else Layout.PER_LAYER
    links = make_links(family, shape)
    if shape.tied and _OUTPUT_KEY in found:
        _check_tied_output(reader, shape.vocab_size)
        del found[_OUTPUT_KEY]
    check_coverage(
        str(directory), megatron_shapes(links, layout, shape.num_layers), found, PADDED_KEYS
    )
    ignored = len(reader.tensors) - len(found) + len(reader.objects)
    return MegatronModel(family, shape, links, layout, reader, ignored)


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
            f"config.json says tie_word_embeddings=true, but {PADDED_KEYS[1]} differs from "
            f"{PADDED_KEYS[0]}; set tie_word_embeddings to false in the assets' config.json"
        )


def with_vocab_rows(model: MegatronModel, rows: int) -> MegatronModel:
    """Returns the model cut to the first `rows` vocabulary rows (for comparing before a resize)."""
    shape = replace(model.shape, vocab_size=rows)
    return replace(model, shape=shape, links=make_links(model.family, shape))
