"""Low-rank adapters beside the checkpoint that they were trained on: merged, or as PEFT has them.

A merged tensor is W + alpha / rank * B A, computed in float32 and rounded once. Specified by
tests/convert/test_lora.py.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_bp.convert.families import read_model
from megatron_bp.convert.hf_assets import read_config
from megatron_bp.convert.link import Link
from megatron_bp.convert.megatron_model import LATEST, MegatronModel, find_iteration
from megatron_bp.convert.plan import make_links
from megatron_bp.convert.torch_dist_io import TorchDistReader

_IN_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(?:(?P<number>\d+)\.)?(?P<module>.+)\.\w+$")
Factors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Adapters:
    """A checkpoint of a run with --bdlm-lora-rank: its arguments, and A and B of each module."""

    directory: Path
    args: Mapping[str, Any]
    iteration: int
    factors: Mapping[tuple[int, str], Factors]

    @property
    def rank(self) -> int:
        """Columns of B."""
        return int(self.args["bdlm_lora_rank"])

    @property
    def alpha(self) -> float:
        """B A is multiplied by alpha / rank."""
        return float(self.args["bdlm_lora_alpha"])

    def find(self, key: str, layer: int) -> Factors | None:
        """Returns A and B for a tensor's key (of layer `layer` of a stacked key), if it has any."""
        found = _IN_LAYER.search(key)
        if found is None or not key.endswith(".weight"):
            return None
        number = layer if layer >= 0 else int(found["number"] or -1)
        return self.factors.get((number, found["module"]))


def open_adapters(folder: Path) -> Adapters:
    """Returns the adapters of the newest checkpoint under `folder`, in float32.

    Raises: ValueError when it holds none.
    """
    directory = find_iteration(folder, LATEST)
    reader = TorchDistReader(directory)
    state = reader.common_state()
    args = vars(state.get("args", argparse.Namespace()))
    found: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for key, info in reader.tensors.items():
        name = _IN_LAYER.match(key)
        factor = key.rpartition(".")[2]
        if name is None or factor not in ("lora_a", "lora_b"):
            continue
        stacked = name["number"] is None
        for layer in range(info.shape[0]) if stacked else (int(name["number"]),):
            rows = [part for _, part in reader.iter_rows(key, layer if stacked else -1)]
            found.setdefault((layer, name["module"]), {})[factor] = torch.cat(rows).float()
    if not found or not args.get("bdlm_lora_rank"):
        raise ValueError(
            f"{folder} holds no adapters; give the --save folder of a run with --bdlm-lora-rank, "
            "and its base as the checkpoint to export"
        )
    factors = {module: (both["lora_a"], both["lora_b"]) for module, both in found.items()}
    return Adapters(directory, args, int(state.get("iteration", 0)), factors)


class MergedReader(TorchDistReader):
    """A checkpoint whose tensors read as if adapters had been merged into them."""

    def __init__(self, directory: Path, every: Sequence[Adapters]) -> None:
        """Reads only metadata of the base."""
        super().__init__(directory)
        self._every = tuple(every)

    def iter_rows(self, key: str, layer: int = -1) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first row, rows) blocks, in float32 where an adapter was added."""
        pairs = [(one.alpha / one.rank, one.find(key, layer)) for one in self._every]
        for lo, rows in super().iter_rows(key, layer):
            for scale, factors in pairs:
                if factors is not None:
                    a, b = factors
                    rows = rows.float() + scale * (b[lo : lo + len(rows)] @ a)
            yield lo, rows

    def stamp(self) -> list[tuple[str, int, int]]:
        """Returns name, size and time of every file of the base and of the adapters."""
        found = super().stamp()
        for one in self._every:
            found += TorchDistReader(one.directory).stamp()
        return found


def merge(model: MegatronModel, every: Sequence[Adapters]) -> MegatronModel:
    """Returns the model with adapters merged into what its reader reads.

    Raises: ValueError when an adapter fits no tensor of the model.
    """
    if not every:
        return model
    shapes = {}
    for link in model.links:
        stored = model.stored(link)
        found = _IN_LAYER.search(stored.key)
        if found and stored.key.endswith(".weight"):
            shapes[link.layer, found["module"]] = link.shape
    for one in every:
        for (layer, module), (a, b) in one.factors.items():
            shape = shapes.get((layer, module))
            if shape != (b.size(0), a.size(1)):
                raise ValueError(
                    f"{one.directory}: the adapter of layer {layer} {module} is for a weight "
                    f"{[b.size(0), a.size(1)]}, and {model.reader.directory} has "
                    f"{'none' if shape is None else list(shape)}; give the base it was trained on"
                )
    return replace(model, reader=MergedReader(model.reader.directory, every))


def write_peft(adapters: Adapters, assets: Path, target: Path) -> dict[str, Any]:
    """Writes adapters as PEFT reads them; returns a summary.

    A fused tensor's A is that of each of its parts, and B's rows go the way of the weight's.
    Raises: ValueError when `target` exists.
    """
    if target.exists():
        raise ValueError(f"{target} exists; name a new directory")
    family, shape = read_model(read_config(assets))
    tensors: dict[str, torch.Tensor] = {}
    for link in make_links(family, shape):
        factors = adapters.factors.get((link.layer, link.name.removesuffix(".weight")))
        if factors is not None:
            tensors |= _peft_tensors(link, factors)
    if len(tensors) < 2 * len(adapters.factors):
        raise ValueError(f"{assets} describes another model than {adapters.directory}")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(assets),
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
    }
    target.mkdir(parents=True)
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    (target / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return {"tensors": len(tensors), "iteration": adapters.iteration, **config}


def _peft_tensors(link: Link, factors: Factors) -> dict[str, torch.Tensor]:
    a, b = factors
    made = {}
    for source, (name, shape) in enumerate(zip(link.sources, link.source_shapes, strict=True)):
        rows = b.new_empty(shape[0], b.size(1))
        for piece in link.pieces:
            if piece.source == source:
                part = b[piece.target_lo : piece.target_lo + piece.rows]
                rows[piece.source_lo : piece.source_lo + piece.rows] = part
        module = f"base_model.model.{name.removesuffix('.weight')}"
        made[f"{module}.lora_A.weight"] = a.clone()
        made[f"{module}.lora_B.weight"] = rows
    return made
