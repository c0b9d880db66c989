"""Specifies draft2hf: a drafter leaves a checkpoint that holds its target as well, alone."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, hf_to_mcore
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.hf_assets import patch_json
from megatron_bp.convert.link import TensorInfo
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from megatron_bp.convert.torch_dist_io import COMMON_STATE, Chunk, TorchDistReader
from megatron_bp.convert.torch_dist_writer import write_torch_dist
from tests.convert.tiny_families import make_case, write_repository
from tests.convert.tiny_models import read_hf, same_bits

FOREIGN = "decoder.layers.self_attention.linear_qkv.weight"


def _train(root: Path, release: Path) -> Path:
    """Writes what training saves: the drafter, the frozen target and optimizer state."""
    reader = TorchDistReader(release)
    tensors = {
        key: torch.cat([rows for _, rows in reader.iter_rows(key)]) for key in reader.tensors
    }
    tensors |= {FOREIGN: torch.ones(2, 6, 4), "embedding.word_embeddings.weight": torch.ones(9, 4)}
    tensors |= {f"optimizer.state.exp_avg.{FOREIGN}": torch.ones(2, 6, 4)}
    chunks = [
        Chunk(key, TensorInfo(tuple(t.shape), t.dtype), (0,) * t.dim(), tuple(t.shape))
        for key, t in tensors.items()
    ]
    state = {"iteration": 5, "args": argparse.Namespace(bdlm_objective="standard", block_size=32)}
    write_torch_dist(
        root / "iter_0000005", chunks, {COMMON_STATE: state}, lambda c: tensors[c.key].clone()
    )
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return root


@pytest.mark.parametrize("name", ["dflash", "dflash2"])
def test_a_drafter_is_exported_without_its_target(tmp_path: Path, name: str):
    hf = write_repository(tmp_path / "hf", *make_case(name))
    config = json.loads((hf / "config.json").read_text())
    layers = config["num_hidden_layers"]
    patch_json(
        hf / "config.json",
        {
            "is_causal": False,
            "num_target_layers": 1 + max(config["dflash_config"]["target_layer_ids"]),
            "layer_types": config.get("layer_types") or ["full_attention"] * layers,
        },
    )
    hf_to_mcore(
        ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False), Silent()
    )
    trained = _train(tmp_path / "trained", tmp_path / "m" / "release")
    sizes = (-1, "keep", 10**9, 0, -1, False)
    request = ExportRequest(trained, tmp_path / "back", hf, *sizes, serve_as=name)
    manifest = mcore_to_hf(request, Silent())
    before, after = read_hf(hf), read_hf(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(same_bits(before[key], after[key]) for key in before)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["dflash_config"]["causal"] is False
    assert written["block_size"] == written["dflash_config"]["block_size"]
    assert "logit_alignment" not in written
    assert (manifest["family"], manifest["exported_iteration"]) == (name, 5)
