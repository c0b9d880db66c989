"""What tools/preprocess.py guarantees for chats, prompts and ids."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.test_rendering import CHATML, FORGETFUL, chat
from tests.tools.test_preprocess import read_rows, write_tokenizer

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
pytest.importorskip("megatron.core", reason="owns the dataset format")
tokenizers = pytest.importorskip("tokenizers", reason="encodes the text")
preprocess = importlib.import_module("preprocess")

MARKED = (
    "{% for m in messages %}<|start|>{{ m.role }} {% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., int]:
    """Runs the tool with a byte-level tokenizer that has the given chat template."""

    def call(template: str, *arguments: object) -> int:
        folder = tmp_path / "tokenizer"
        if not folder.exists():
            write_tokenizer(folder, tokenizers.pre_tokenizers.ByteLevel.alphabet())
        template = template.replace("<e>", "<|end|>")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|end|>",
        }
        config |= {"chat_template": template} if template else {}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        fixed = [str(tmp_path / "data/set"), "--tokenizer", str(folder)]
        return preprocess.main(fixed + [str(argument) for argument in arguments])

    return call


def write_lines(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def learnt_text(tmp_path: Path) -> list[tuple[str, str]]:
    """(whole text, text of the learnt tokens) of each document."""
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer/tokenizer.json"))
    rows, masks = read_rows(tmp_path / "data/set"), read_rows(tmp_path / "data/set_mask")
    assert [len(row) for row in rows] == [len(mask) for mask in masks]
    return [
        tuple(  # type: ignore[misc]
            backend.decode(kept.tolist(), skip_special_tokens=False)
            for kept in (row, row[mask == 1])
        )
        for row, mask in zip(rows, masks, strict=True)
    ]


CHATS = [chat("who?", "me", "why?", "so"), chat("x" * 30, "y")]


@pytest.mark.parametrize(("template", "how"), [(CHATML, "rendering"), (MARKED, "generation marks")])
def test_the_answers_of_chats_are_learnt(
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    template: str,
    how: str,
) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": messages} for messages in CHATS])
    assert run(template, path, "--format", "chat") == 0
    found = learnt_text(tmp_path)
    assert [answers for _, answers in found] == ["me<|end|>so<|end|>", "y<|end|>"]
    assert found[0][0].index("who?") < found[0][0].index("me<|end|>") < found[0][0].index("why?")
    printed = capsys.readouterr()
    assert f"assistant tokens: {how}" in printed.err
    tokens = sum(len(row) for row in read_rows(tmp_path / "data/set"))
    learnt = sum(int(mask.sum()) for mask in read_rows(tmp_path / "data/set_mask"))
    assert f"{learnt} tokens are learnt ({100 * learnt / tokens:.1f} %)" in printed.out


def test_a_template_without_a_mask_stops_before_anything_is_written(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    for template, message in ((FORGETFUL, "gives no assistant mask"), ("", "has no chat template")):
        assert run(template, path, "--format", "chat") == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_a_message_that_spells_a_special_token_is_refused(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": CHATS[0]}, {"messages": chat("<|end|>", "a")}]
    path = write_lines(tmp_path / "chats.jsonl", rows)
    assert run(CHATML, path, "--format", "chat") == 1
    assert f"{path}:2: a message spells the special token <|end|>" in capsys.readouterr().err
    assert run(CHATML, path, "--format", "chat", "--on-error", "skip") == 0
    assert len(learnt_text(tmp_path)) == 1
    assert run(CHATML, path, "--format", "chat", "--parse-special", "--overwrite") == 0
    assert len(learnt_text(tmp_path)) == 2


def test_completions_are_learnt_with_their_end(run: Callable[..., int], tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "1+1=", "completion": "2"}])
    assert run("", path, "--format", "prompt") == 0
    assert learnt_text(tmp_path) == [("1+1=2<|end|>", "2<|end|>")]


def test_ids_come_back_as_they_were(run: Callable[..., int], tmp_path: Path) -> None:
    rows = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8]}]
    path = write_lines(tmp_path / "ids.jsonl", rows)
    assert run("", path, "--format", "ids", "--workers", "2", "--piece-bytes", "1") == 0
    assert [row.tolist() for row in read_rows(tmp_path / "data/set")] == [[5, 6, 7], [8]]
    masks = [mask.tolist() for mask in read_rows(tmp_path / "data/set_mask")]
    assert masks == [[0, 1, 1], [1]]


def test_a_mask_token_must_be_a_single_id(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"text": "a"}, {"text": "b"}])
    assert run("", path, "--mask-token", "<mask>") == 1
    message = capsys.readouterr().err
    assert "mask_token='<mask>' is not a single id of this tokenizer, which reads it as" in message
    assert run("", path, "--mask-token", "b") == 0
    printed = capsys.readouterr()
    assert "--mask-token-id " in printed.err
    assert "dropped 1: holds the mask token" in printed.out


def test_a_replaced_dataset_leaves_no_old_mask(run: Callable[..., int], tmp_path: Path) -> None:
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    assert run(CHATML, chats, "--format", "chat") == 0
    (tmp_path / "a.txt").write_text("text")
    assert run(CHATML, tmp_path / "a.txt", "--overwrite") == 0
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["set.bin", "set.idx"]


def test_a_table_gives_what_json_lines_give(run: Callable[..., int], tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="reads Parquet files")
    from pyarrow import parquet

    rows = [{"messages": messages} for messages in CHATS]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chats.parquet")
    assert run(CHATML, tmp_path / "chats.parquet", "--format", "chat") == 0
    from_table = learnt_text(tmp_path)
    path = write_lines(tmp_path / "chats.jsonl", list(rows))
    assert run(CHATML, path, "--format", "chat", "--overwrite") == 0
    assert learnt_text(tmp_path) == from_table
    assert np.concatenate(read_rows(tmp_path / "data/set")).size > 0
