"""The picture shows the sample that training reads, and is a picture."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_rendering import CHATML, chat
from tests.tools.test_preprocess import write_tokenizer
from tests.tools.test_preprocess_sft import write_lines

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
pytest.importorskip("megatron.core", reason="owns the dataset format")
pytest.importorskip("matplotlib", reason="draws")
tokenizers = pytest.importorskip("tokenizers", reason="encodes the text")
preprocess = importlib.import_module("preprocess")
show_batch = importlib.import_module("show_batch")

LENGTH = 136


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, packed chats and a stream of text."""
    folder = tmp_path_factory.mktemp("batch")
    alphabet = ["<mask>", *tokenizers.pre_tokenizers.ByteLevel.alphabet()]
    tokenizer = write_tokenizer(folder / "tokenizer", alphabet)
    backend = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    backend.add_special_tokens(["<mask>"])
    backend.save(str(tokenizer / "tokenizer.json"))
    template = CHATML.replace("<e>", "<|end|>").replace("system\\nhelp", "")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "chat_template": template,
    }
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config))
    rows: list[object] = [{"messages": chat("q" * n, "answer" * 2)} for n in range(1, 12)]
    path = write_lines(folder / "chats.jsonl", rows)
    common = ["--tokenizer", str(tokenizer)]
    given = [str(folder / "chats"), str(path), "--format", "chat", "--max-length", str(LENGTH)]
    assert preprocess.main([*given, *common]) == 0
    (folder / "text.txt").write_text("some text. " * 60)
    assert preprocess.main([str(folder / "text"), str(folder / "text.txt"), *common]) == 0
    return folder


def flags(data: Path, output: str, *more: str) -> list[str]:
    fixed = f"--tokenizer {data}/tokenizer --mask-token <mask> --seq-length {LENGTH} --split 1,0,0"
    return [str(data / output), *fixed.split(), "--block-size", "8", *more]


@pytest.mark.parametrize("objective", ["standard", "fast_dllm_v2"])
def test_what_is_shown_is_what_training_reads(data: Path, objective: str) -> None:
    more = ["--data-path", str(data / "chats"), "--bdlm-data", "sft", "--sample", "1"]
    args = show_batch.parse(flags(data, "a.png", *more, "--bdlm-objective", objective))
    shown = show_batch.load(args)
    assert shown.masked.any()
    assert not (shown.masked & ~shown.learnt).any()
    assert not (shown.target & ~shown.masked).any()
    assert len(set(shown.document.tolist())) > 2
    assert "".join(shown.texts).count("answeranswer") == len(set(shown.document.tolist()) - {-1})
    rows = [plan.rows.position[plan.rows.stream == 0] for plan in shown.plans]
    assert sorted(np.concatenate(rows)) == list(range(LENGTH))
    other = show_batch.load(show_batch.parse(flags(data, "a.png", *more, "--seed", "5")))
    assert other.masked.shape != shown.masked.shape or (other.masked != shown.masked).any()


@pytest.mark.parametrize("more", [("chats", "--bdlm-data", "sft"), ("text",)])
def test_a_picture_is_written(
    data: Path, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    given = flags(data, "b.png", "--data-path", str(data / more[0]), *more[1:], "--ranks", "2")
    assert show_batch.main(given) == 0
    assert f"{LENGTH} tokens" in capsys.readouterr().out
    with Image.open(data / "b.png") as picture:
        assert picture.size[0] == 1710
        assert len(picture.convert("RGB").getcolors(1 << 20) or []) > 20
    assert (data / "b.png").stat().st_size < 200_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--sample", "-1"], "sample=-1 must be 0 or more"),
        (["--mask-token", "<none>"], "is not a single id"),
        (["--ranks", "9"], "ranks=9 must be at most 8"),
        (["--seq-length", "8"], "--max-length 8"),
    ],
)
def test_mistakes_are_named(
    data: Path, change: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--data-path", str(data / "chats"), "--bdlm-data", "sft"]
    assert show_batch.main(flags(data, "c.png", *more, *change)) == 1
    assert message in capsys.readouterr().err
    assert not (data / "c.png").exists()
