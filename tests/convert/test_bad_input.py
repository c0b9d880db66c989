"""Specifies that damaged input is refused by the name of the tensor, and that nothing is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_bp.convert.ar_to_bdlm import ImportRequest, ar_to_bdlm, hf_to_mcore
from megatron_bp.convert.bdlm_settings import BdlmSettings
from megatron_bp.convert.export import ExportRequest, mcore_to_hf
from megatron_bp.convert.link import TensorInfo
from megatron_bp.convert.mask_wish import MaskWish
from megatron_bp.convert.plan import Layout
from megatron_bp.convert.progress import Silent
from megatron_bp.convert.torch_dist_io import COMMON_STATE, Chunk, TorchDistReader
from megatron_bp.convert.torch_dist_writer import write_torch_dist
from tests.convert.tiny_models import QWEN3, make_hf, random_tensors, read_hf

UP = "model.layers.2.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"


def _shard(hf: Path) -> tuple[Path, Path]:
    """Splits the only file in two with an index; returns both."""
    tensors = random_tensors(QWEN3)
    (hf / "model.safetensors").unlink()
    names = list(tensors)
    files = tuple(hf / f"model-{number:05d}-of-00002.safetensors" for number in (1, 2))
    weight_map = {}
    for file, part in zip(files, (names[:20], names[20:]), strict=True):
        save_file({name: tensors[name] for name in part}, file)
        weight_map |= dict.fromkeys(part, file.name)
    (hf / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return files[0], files[1]


def _edit_index(hf: Path, change: Callable[[dict[str, str]], Any]) -> None:
    index = json.loads((hf / INDEX).read_text())
    change(index["weight_map"])
    (hf / INDEX).write_text(json.dumps(index))


def _save(hf: Path, **changes: torch.Tensor) -> None:
    tensors = random_tensors(QWEN3)
    save_file({**tensors, **changes}, hf / "model.safetensors")


def _nan(hf: Path) -> None:
    value = random_tensors(QWEN3)[UP]
    value[70, 3] = float("nan")
    _save(hf, **{UP: value})


def _truncated_shard(hf: Path) -> None:
    file = _shard(hf)[1]
    file.write_bytes(file.read_bytes()[:-10])


def _missing_index_entry(hf: Path) -> None:
    _shard(hf)
    _edit_index(hf, lambda entries: entries.pop(UP))


def _duplicate(hf: Path) -> None:
    files = _shard(hf)
    both = {name: value for name, value in random_tensors(QWEN3).items() if name == UP}
    first = {name: t for name, t in read_hf(hf).items() if name in list(random_tensors(QWEN3))[:20]}
    save_file(first | both, files[0])


def _wrong_shape(hf: Path) -> None:
    _save(hf, **{UP: random_tensors(QWEN3)[UP].T.contiguous()})


def _renamed(hf: Path) -> None:
    tensors = random_tensors(QWEN3)
    tensors["model.layers.2.mlp.upper.weight"] = tensors.pop(UP)
    save_file(tensors, hf / "model.safetensors")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_nan_is_refused_by_name_when_asked(tmp_path: Path, workers: int):
    hf = make_hf(tmp_path / "hf", QWEN3)
    _nan(hf)
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", False, workers=workers)
    with pytest.raises(ValueError, match=rf"{UP} has NaN or infinite values in rows 0 to 79"):
        hf_to_mcore(replace(request, check_finite=True), Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    hf_to_mcore(request, Silent())
    sizes = (-1, "keep", 10**9, 0, -1, False)
    export = ExportRequest(tmp_path / "m", tmp_path / "b", tmp_path / "m" / "hf", *sizes)
    with pytest.raises(ValueError, match=rf"linear_fc1.weight \(for {UP}\) has NaN"):
        mcore_to_hf(replace(export, check_finite=True), Silent())
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "b.partial").exists()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (_truncated_shard, r"00002-of-00002.safetensors is truncated or damaged at model\.norm"),
        (_missing_index_entry, rf"disagree on 1 tensors: {UP}"),
        (_duplicate, rf"{UP} is in both .*00001-of-00002.safetensors and .*00002-of"),
        (_wrong_shape, rf"{UP} has \[48, 80\], config says \[80, 48\]"),
        (_renamed, rf"1 missing: {UP}\n  1 not accounted for: model.layers.2.mlp.upper.weight"),
    ],
)
def test_damaged_sources_are_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], text: str
):
    hf = make_hf(tmp_path / "hf", QWEN3)
    damage(hf)
    with pytest.raises(ValueError, match=text):
        hf_to_mcore(ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", False), Silent())
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_float16_cast_that_overflows_is_refused_when_asked(tmp_path: Path):
    hf = make_hf(tmp_path / "hf", QWEN3)
    value = random_tensors(QWEN3)[UP]
    value[0, 0] = 1e5  # above float16's 65504
    _save(hf, **{UP: value})
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "float16", False)
    with pytest.raises(ValueError, match=rf"{UP} has NaN or infinite .* as torch.float16"):
        hf_to_mcore(replace(request, check_finite=True), Silent())


def test_a_truncated_or_lost_checkpoint_file_is_named_on_export(tmp_path: Path):
    hf = make_hf(tmp_path / "hf", QWEN3)
    hf_to_mcore(ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", False), Silent())
    sizes = (-1, "keep", 10**9, 0, -1, False)
    export = ExportRequest(tmp_path / "m", tmp_path / "b", tmp_path / "m" / "hf", *sizes)
    file = tmp_path / "m" / "release" / "__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"weight cannot be read, its file is truncated"):
        mcore_to_hf(export, Silent())
    file.unlink()
    with pytest.raises(ValueError, match=r"__0_0.distcp is missing; it holds embedding"):
        mcore_to_hf(export, Silent())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m"]


def _rewrite(release: Path, change: Callable[[dict[str, torch.Tensor]], Any], **args: Any) -> None:
    """Replaces a checkpoint by one with changed tensors and other arguments of its run."""
    reader = TorchDistReader(release)
    values = {key: torch.cat([rows for _, rows in reader.iter_rows(key)]) for key in reader.tensors}
    objects = {COMMON_STATE: reader.common_state()}
    vars(objects[COMMON_STATE]["args"]).update(args)
    change(values)
    shutil.rmtree(release)
    chunks = [
        Chunk(key, TensorInfo(tuple(x.shape), x.dtype), (0,) * x.dim(), tuple(x.shape))
        for key, x in values.items()
    ]
    write_torch_dist(release, chunks, objects, lambda chunk: values[chunk.key])


FC1 = "decoder.layers.2.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda x: x.pop(FC1), rf"1 missing: {FC1}\n?$"),
        (lambda x: x.update({f"{FC1}_": x[FC1]}), rf"1 not accounted for: {FC1}_$"),
        (
            lambda x: x.update({"decoder.layers.2.mlp.fc1.weight": x.pop(FC1)}),
            rf"1 missing: {FC1}\n  1 not accounted for: decoder\.layers\.2\.mlp\.fc1\.weight",
        ),
        (
            lambda x: x.update({FC1: x[FC1][1:].clone()}),
            rf"1 of another shape: {FC1} has \[159, 48\], config says \[160, 48\]",
        ),
    ],
    ids=["dropped", "extra", "renamed", "misshapen"],
)
def test_damaged_checkpoints_are_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], text: str
):
    hf = make_hf(tmp_path / "hf", QWEN3)
    hf_to_mcore(ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", False), Silent())
    _rewrite(tmp_path / "m" / "release", change)
    sizes = (-1, "keep", 10**9, 0, -1, False)
    export = ExportRequest(tmp_path / "m", tmp_path / "b", tmp_path / "m" / "hf", *sizes)
    with pytest.raises(ValueError, match=text):
        mcore_to_hf(export, Silent())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m"]


def test_a_mask_id_outside_the_table_is_refused_on_both_ways(tmp_path: Path):
    hf = make_hf(tmp_path / "hf", QWEN3)
    request = ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", overwrite=False)
    settings = BdlmSettings("standard", 8, "preset", "", -1)
    for token_id, text in (
        (101, "=101 is unused, .* --mask-token-id 100 "),
        (5, "cannot become the mask"),
    ):
        wish = MaskWish("", token_id, resize=False, init="mean")
        with pytest.raises(ValueError, match=text):
            ar_to_bdlm(request, settings, wish, Silent())
        assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    hf_to_mcore(request, Silent())
    sizes = (-1, "keep", 10**9, 8, 101, False)
    export = ExportRequest(tmp_path / "m", tmp_path / "b", tmp_path / "m" / "hf", *sizes)
    with pytest.raises(ValueError, match=r"mask_token_id=101 must be in \[0, vocab_size=101\)"):
        mcore_to_hf(replace(export, objective="standard"), Silent())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m"]


def test_the_canvas_of_the_run_reaches_the_profile(tmp_path: Path):
    hf = make_hf(tmp_path / "hf", QWEN3)
    hf_to_mcore(ImportRequest(hf, tmp_path / "m", Layout.PER_LAYER, "keep", False), Silent())
    run = {"bdlm_objective": "sdar", "block_size": 4, "mask_token_id": 100, "clean_rule": "preset"}
    _rewrite(tmp_path / "m" / "release", lambda tensors: None, **run, bdlm_canvas="uniform")
    sizes = (-1, "keep", 10**9, 0, -1, False)
    export = ExportRequest(tmp_path / "m", tmp_path / "b", tmp_path / "m" / "hf", *sizes)
    with pytest.raises(ValueError, match="canvas=uniform: the model was trained to correct"):
        mcore_to_hf(replace(export, serve_as="sdar"), Silent())
    assert mcore_to_hf(export, Silent())["canvas"] == "uniform"
