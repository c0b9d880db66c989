"""tools/plan_topology.py prints runs and flags for built-in and Hugging Face shapes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_prints_the_best_runs_flags_and_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model nemotron-8b --length 131072 --gpus 8 --why --grad-wire model --best 2"
    assert load("plan_topology").main(words.split()) == 0
    text = capsys.readouterr().out
    assert "--block-parallel-size" in text
    assert "--bp-grad-wire-dtype model" in text
    assert "ruled out:" in text
    assert text.count("CSBP") >= 2


def test_it_reads_a_config_and_a_calibration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.json").write_text(json.dumps({"hardware": {"matmul_tflops": 300}}))
    words = f"--model {tmp_path} --length 32768 --gpus 8 --calibration {tmp_path}/mine.json"
    assert load("plan_topology").main(words.split()) == 0
    assert "--num-layers 16 --hidden-size 2048" in capsys.readouterr().out


def test_it_fails_and_says_why_if_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model qwen3.5-27b --length 262144 --block-size 256 --gpus 1"
    assert load("plan_topology").main(words.split()) == 1
    assert "nothing fits:" in capsys.readouterr().out


def test_a_model_that_is_neither_built_in_nor_a_file_is_refused() -> None:
    with pytest.raises(ValueError, match="'nope' is not built in; use one of nemotron-3b, "):
        load("plan_topology").main(["--model", "nope", "--length", "4096", "--gpus", "8"])


def test_the_page_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    module = load("paper_page")
    assert module.main(["--check"]) == 0
    assert "up to date" in capsys.readouterr().out
    assert module.main(["--help"]) == 2
