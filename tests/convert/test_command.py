"""Specifies tools/convert_checkpoint.py: sub-commands, exit status, error lines."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.convert.tiny_models import LLAMA, make_hf, read_hf

PATH = Path(__file__).parents[2] / "tools" / "convert_checkpoint.py"
spec = importlib.util.spec_from_file_location("convert_checkpoint", PATH)
assert spec is not None
assert spec.loader is not None
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


def _run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, dict[str, Any], str]:
    status = tool.main([str(word) for word in words])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else {}, err


def test_a_model_goes_through_every_command(tmp_path: Path, capsys):
    hf = make_hf(tmp_path / "hf", LLAMA)
    m, back = tmp_path / "m", tmp_path / "back"
    status, made, err = _run(capsys, "ar2bdlm", hf, m, "--mask-token-id", 100, "--block-size", 8)
    assert (status, made["tokenizer"]) == (0, "encode and decode agree")
    assert "converting: 100%" in err  # the progress bar
    status, seen, _ = _run(capsys, "inspect", m)
    assert (status, seen["kind"], seen["family"], seen["num_layers"]) == (0, "megatron", "llama", 2)
    assert (seen["mask_token_id"], seen["block_size"], seen["num_tensors"]) == (100, 8, 14)
    assert _run(capsys, "mcore2hf", m, back)[0] == 0
    status, seen, _ = _run(capsys, "inspect", back)
    assert (seen["kind"], seen["vocab_size"], seen["mask_token_id"]) == ("hf", 101, 100)
    assert _run(capsys, "verify", back, m)[:2] == (
        0,
        {"tensors": 20, "differ": [], "exempt_rows": 0},
    )
    assert _run(capsys, "verify", hf, m)[:2] == (0, {"tensors": 20, "differ": [], "exempt_rows": 1})


def test_verify_names_a_tensor_that_differs_in_one_bit(tmp_path: Path, capsys):
    hf = make_hf(tmp_path / "hf", LLAMA)
    assert _run(capsys, "hf2mcore", hf, tmp_path / "m")[0] == 0
    tensors = read_hf(hf)
    name = "model.layers.1.self_attn.v_proj.weight"
    tensors[name].view(torch.uint8)[-1, 0] ^= 1
    save_file(tensors, hf / "model.safetensors")
    status, result, _ = _run(capsys, "verify", hf, tmp_path / "m")
    assert (status, result["differ"]) == (1, [name])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("hf2mcore", "{}/none", "{}/m"), "none is not a directory"),
        (("hf2mcore", "{}", "{}/m"), "has no config.json"),
        (("hf2mcore", "{}/hf", "{}/a/b"), "a is not a directory; create it"),
        (("hf2mcore", "{}/hf", "{}/hf"), "already exists; choose another path or give --overwrite"),
        (("hf2mcore", "{}/hf", "{}/hf", "--overwrite"), "this tool did not write it"),
        (("ar2bdlm", "{}/hf", "{}/m"), "no mask token given"),
        (("ar2bdlm", "{}/hf", "{}/m", "--mask-token-id", "0"), "is the tokenizer's unk_token"),
        (("ar2bdlm", "{}/hf", "{}/m", "--objective", "none"), "use hf2mcore, or 'standard'"),
        (("ar2bdlm", "{}/hf", "{}/m", "--block-size", "0"), "block_size=0 must be at least 1"),
        (("mcore2hf", "{}/none", "{}/b", "--hf-assets", "{}/hf"), "none is not a directory"),
        (("mcore2hf", "{}/hf", "{}/b", "--hf-assets", "{}/hf"), "is no Megatron checkpoint"),
        (("mcore2hf", "{}/hf/sub", "{}/b"), "give --hf-assets DIR"),
        (("inspect", "{}"), "is no Megatron checkpoint"),
        (("verify", "{}/hf", "{}/hf"), "is no Megatron checkpoint"),
    ],
)
def test_a_mistake_is_one_clear_line_and_writes_nothing(
    tmp_path: Path, capsys, words: tuple[str, ...], text: str
):
    make_hf(tmp_path / "hf", LLAMA)
    status, out, err = _run(capsys, *(word.format(tmp_path) for word in words))
    assert (status, out) == (1, {})
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert text in line
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_missing_iteration_is_named_with_those_there(tmp_path: Path, capsys):
    hf = make_hf(tmp_path / "hf", LLAMA)
    _run(capsys, "hf2mcore", hf, tmp_path / "m")
    (tmp_path / "m" / "iter_0000004").mkdir()
    _, _, err = _run(capsys, "mcore2hf", tmp_path / "m", tmp_path / "b", "--iteration", 5)
    assert "has no iter_0000005; it has iter_0000004" in err


def test_overwrite_replaces_an_earlier_output(tmp_path: Path, capsys):
    hf = make_hf(tmp_path / "hf", LLAMA)
    assert _run(capsys, "hf2mcore", hf, tmp_path / "m")[0] == 0
    assert _run(capsys, "hf2mcore", hf, tmp_path / "m")[0] == 1
    assert _run(capsys, "hf2mcore", hf, tmp_path / "m", "--overwrite")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "m"]
