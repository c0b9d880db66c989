"""A killed job goes on from its finished pieces; another job does not touch them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_bp.data import work
from megatron_bp.data.encoding import Encoding, MalformedInputError, Overflow, encode_piece
from megatron_bp.data.rendering import AssistantMask, Format
from megatron_bp.data.sources import cut_work

tokenizers = pytest.importorskip("tokenizers", reason="encodes the text")
NUM = 12


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> str:
    """A tokenizer with the ids of single letters."""
    vocab = {letter: index for index, letter in enumerate("?abcdefghij")}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="?"))
    backend.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def encoding(tokenizer_file: str, **changes: object) -> Encoding:
    given: dict[str, object] = {
        "format": Format.IDS,
        "tokenizer_file": tokenizer_file,
        "tokenizer_folder": "",
        "num_ids": 11,
        "eos_id": -1,
        "mask_id": -1,
        "json_key": "text",
        "parse_special": False,
        "drop_lossy": False,
        "assistant_mask": AssistantMask.MARKS,
        "max_length": 0,
        "overflow": Overflow.REJECT,
        "stop_on_error": True,
    }
    return Encoding(**{**given, **changes})  # type: ignore[arg-type]


def write_rows(path: Path, rows: list[object]) -> list[Path]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [path]


def ids(*tokens: int, mask: list[int] | None = None) -> dict[str, object]:
    return {"input_ids": list(tokens), "loss_mask": mask or [1] * len(tokens)}


def test_a_killed_job_goes_on_where_it_was(
    tmp_path: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_rows(tmp_path / "rows.jsonl", [ids(index % 10) for index in range(NUM)])
    pieces, rules = list(cut_work(files, 40)), encoding(tokenizer_file)
    assert len(pieces) > 5
    folder, calls = tmp_path / "set.parts", []

    def dying(*given: object) -> object:
        calls.append(given)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode_piece(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(work, "encode_piece", dying)
    description = work.describe_job(files, rules, 40)
    work.open_parts(folder, description, False)
    with pytest.raises(KeyboardInterrupt):
        work.encode_parts(pieces, rules, folder, 1, lambda done: None)
    (folder / "part-000009.partial").write_bytes(b"half written")
    progress: list[work.Progress] = []
    work.open_parts(folder, description, False)
    work.encode_parts(pieces, rules, folder, 1, progress.append)
    assert len(calls) == len(pieces) + 1, "three finished pieces were not encoded again"
    assert (progress[0].num_reused, progress[0].weight) == (3, 0)
    tokens = np.concatenate([part.tokens for part in work.read_parts(folder, len(pieces))])
    assert tokens.tolist() == [index % 10 for index in range(NUM)]


def test_the_work_of_another_job_is_kept_until_overwritten(
    tmp_path: Path, tokenizer_file: str
) -> None:
    files, folder = write_rows(tmp_path / "rows.jsonl", [ids(1)]), tmp_path / "set.parts"
    first = work.describe_job(files, encoding(tokenizer_file), 40)
    work.open_parts(folder, first, False)
    (folder / "part-000000.npz").write_bytes(b"work")
    others = [
        work.describe_job(files, encoding(tokenizer_file, max_length=9), 40),
        work.describe_job(files, encoding(tokenizer_file), 41),
    ]
    write_rows(tmp_path / "rows.jsonl", [ids(1, 2)])
    others.append(work.describe_job(files, encoding(tokenizer_file), 40))
    assert len({first, *others}) == 4
    for other in others:
        with pytest.raises(ValueError, match="unfinished work of other options or inputs"):
            work.open_parts(folder, other, False)
    assert (folder / "part-000000.npz").exists()
    work.open_parts(folder, others[0], True)
    assert not (folder / "part-000000.npz").exists()


@pytest.mark.parametrize(
    ("overflow", "lengths", "what"),
    [
        (Overflow.REJECT, [4], "longer than --max-length 4"),
        (Overflow.TRUNCATE, [4, 4], "truncated to --max-length 4"),
        (Overflow.SPLIT, [4, 4, 4, 2], "split into pieces of --max-length 4"),
    ],
)
def test_long_documents_follow_the_rule_and_are_counted(
    tmp_path: Path, tokenizer_file: str, overflow: Overflow, lengths: list[int], what: str
) -> None:
    files = write_rows(tmp_path / "rows.jsonl", [ids(1, 2, 3, 4), ids(*range(10))])
    rules = encoding(tokenizer_file, max_length=4, overflow=overflow)
    piece = encode_piece(next(cut_work(files, 1000)), rules)
    assert [len(tokens) for tokens in piece.tokens] == lengths
    assert (piece.dropped + piece.changed)[what] == 1
    if overflow is Overflow.SPLIT:
        assert np.concatenate(piece.tokens[1:]).tolist() == list(range(10))


def test_pieces_without_anything_to_learn_are_left_out_and_counted(
    tmp_path: Path, tokenizer_file: str
) -> None:
    rows = [
        ids(1, 2, mask=[0, 0]),
        ids(1, 2, 3, 4, 5, mask=[0, 0, 0, 0, 1]),
        ids(),
        ids(1, 9, mask=[0, 1]),
    ]
    files = write_rows(tmp_path / "rows.jsonl", rows)
    for overflow, kept, what in (
        (Overflow.SPLIT, [[5], [1, 9]], "pieces left out: no token to learn"),
        (Overflow.TRUNCATE, [[1, 9]], "no token to learn in the first 4"),
    ):
        rules = encoding(tokenizer_file, max_length=4, overflow=overflow)
        piece = encode_piece(next(cut_work(files, 1000)), rules)
        assert [tokens.tolist() for tokens in piece.tokens] == kept
        assert (piece.dropped + piece.changed)[what] == 1
        assert (piece.dropped["no token to learn"], piece.dropped["empty"]) == (1, 1)
        assert piece.learnt[-1].tolist() == [False, True]


def test_bad_records_stop_the_job_or_are_named(tmp_path: Path, tokenizer_file: str) -> None:
    files = write_rows(tmp_path / "rows.jsonl", [ids(1), ids(3, 11), {"input_ids": "x"}])
    spans = next(cut_work(files, 1000))
    with pytest.raises(MalformedInputError, match=r"rows.jsonl:2: token 11 is outside the vocab"):
        encode_piece(spans, encoding(tokenizer_file))
    piece = encode_piece(spans, encoding(tokenizer_file, stop_on_error=False))
    assert len(piece.tokens) == 1
    assert [line.split(": ")[0].rpartition(":")[2] for line in piece.malformed] == ["2", "3"]


def test_documents_with_the_mask_token_are_left_out(tmp_path: Path, tokenizer_file: str) -> None:
    files = write_rows(tmp_path / "rows.jsonl", [ids(1, 7), ids(1, 8)])
    piece = encode_piece(next(cut_work(files, 1000)), encoding(tokenizer_file, mask_id=7))
    assert [tokens.tolist() for tokens in piece.tokens] == [[1, 8]]
    assert piece.dropped["holds the mask token"] == 1


def test_the_end_token_of_a_completion_is_learnt(tmp_path: Path, tokenizer_file: str) -> None:
    files = write_rows(tmp_path / "rows.jsonl", [{"prompt": "ab", "completion": "c"}])
    rules = encoding(tokenizer_file, format=Format.PROMPT, eos_id=10)
    piece = encode_piece(next(cut_work(files, 1000)), rules)
    assert piece.tokens[0].tolist() == [1, 2, 3, 10]
    assert piece.learnt[0].tolist() == [False, False, True, True]
    assert piece.num_bytes == 3
