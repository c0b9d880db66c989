"""What tools/preprocess.py, megatron_bp/data and megatron_bp/mcore/indexed.py guarantee."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
pytest.importorskip("megatron.core", reason="owns the dataset format")
tokenizers = pytest.importorskip("tokenizers", reason="encodes the text")
preprocess = importlib.import_module("preprocess")
indexed = importlib.import_module("megatron_bp.mcore.indexed")

TEXTS = {
    "a.py": "def f(x):\n    return x\n",
    "b/c.py": "# caf\u00e9 \u4f60\u597d <|end|> \r\n\x00\tend",
    "b/skipped.py": "print('left out')",
    "d.py": "x = 1\n" * 50,
    "empty.py": "",
    "readme.txt": "not matched by the glob",
}
TAKEN = ("a.py", "b/c.py", "d.py")


def write_tokenizer(folder: Path, alphabet: list[str]) -> Path:
    """A byte-level tokenizer directory whose end-of-document token <|end|> has id 0."""
    vocab = {token: index for index, token in enumerate(["<|end|>", *sorted(alphabet), "de"])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [("d", "e")], unk_token="<|end|>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer", tokenizers.pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (tmp_path / "corpus" / "latin1.py").write_bytes(b"# caf\xe9")
    return tmp_path / "corpus"


@pytest.fixture
def run(tmp_path: Path, tokenizer: Path) -> Callable[..., int]:
    """Runs the tool on inputs below tmp_path, into tmp_path/data/set."""

    def call(*arguments: str, prefix: str = "data/set") -> int:
        fixed = [str(tmp_path / prefix), "--tokenizer", str(tokenizer)]
        return preprocess.main(fixed + [str(argument) for argument in arguments])

    return call


def read_rows(prefix: Path) -> list[np.ndarray]:
    """The tokens of each document, copied: a row is unmapped together with its dataset."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1))
    return [dataset[index].astype(np.int64) for index in range(len(dataset))]


def read_back(prefix: Path, tokenizer: Path) -> list[tuple[str, int]]:
    """(text without the last token, last token) of each document."""
    backend = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    return [
        (backend.decode(row[:-1].tolist(), skip_special_tokens=False), int(row[-1]))
        for row in read_rows(prefix)
    ]


PYTHON = ("--glob", "*.py", "--exclude", "*/skipped*")


def test_every_document_comes_back_byte_exact_with_its_end_token(
    run: Callable[..., int], corpus: Path, tmp_path: Path, tokenizer: Path
) -> None:
    assert run(corpus, *PYTHON) == 0
    documents = read_back(tmp_path / "data/set", tokenizer)
    assert documents == [(TEXTS[name], 0) for name in TAKEN]
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["set.bin", "set.idx"]


def test_literal_special_tokens_are_text_unless_asked(
    run: Callable[..., int], corpus: Path, tmp_path: Path
) -> None:
    counts = []
    for index, flags in enumerate(((), ("--parse-special",), ("--parse-special", "--no-eos"))):
        assert run(corpus / "b/c.py", *flags, prefix=f"data/{index}") == 0
        counts.append(int((read_rows(tmp_path / f"data/{index}")[0] == 0).sum()))
    assert counts == [1, 2, 1]


def test_workers_and_piece_sizes_do_not_change_the_result(
    run: Callable[..., int], corpus: Path, tmp_path: Path
) -> None:
    lines = "".join(
        json.dumps({"text": f"line {index}\n" * index}) + "\n" for index in range(1, 30)
    )
    (corpus / "lines.jsonl").write_text(lines)
    assert run(corpus, corpus / "lines.jsonl", *PYTHON) == 0
    expected = (tmp_path / "data/set.bin").read_bytes()
    for piece_bytes in (1, 7, 100, 1000):  # boundaries fall inside, on and between lines
        cut = ("--overwrite", "--piece-bytes", str(piece_bytes))
        assert run(corpus, corpus / "lines.jsonl", *PYTHON, *cut) == 0
        assert (tmp_path / "data/set.bin").read_bytes() == expected
    arguments = ("--workers", "2", "--overwrite")
    assert run(corpus, corpus / "lines.jsonl", *PYTHON, *arguments) == 0
    assert (tmp_path / "data/set.bin").read_bytes() == expected


def test_json_lines_become_documents_and_bad_lines_are_named(
    run: Callable[..., int],
    corpus: Path,
    tmp_path: Path,
    tokenizer: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = ['{"code": "one\\n"}', "", "{", '{"text": "x"}', '{"code": ""}', '{"code": "two"}']
    (corpus / "lines.jsonl").write_text("\n".join(lines))
    assert run(corpus / "lines.jsonl", "--json-key", "code", "--on-error", "skip") == 0
    assert read_back(tmp_path / "data/set", tokenizer) == [("one\n", 0), ("two", 0)]
    printed = capsys.readouterr().out
    for reason in ("blank line", "line is not JSON", "no text under key 'code'", "empty"):
        assert f"dropped 1: {reason}" in printed
    assert f"malformed: {corpus / 'lines.jsonl'}:3: line is not JSON" in printed
    assert f"malformed: {corpus / 'lines.jsonl'}:4: no text under key 'code'" in printed


def test_summary_counts_documents_tokens_and_drops(
    run: Callable[..., int], corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus, *PYTHON) == 0
    printed = capsys.readouterr().out
    num_bytes = [len(TEXTS[name].encode()) for name in TAKEN]
    assert f"3 documents, {sum(num_bytes) + 3 - 1} tokens" in printed  # "de" of "def" is one token
    assert "dropped 1: not UTF-8" in printed
    assert "dropped 1: empty" in printed


def test_histogram_covers_every_document_once() -> None:
    lengths = (1, 2, 3, 4, 7, 8, 1000)
    rows = indexed.Summary(lengths, 0, 0, {}, {}, ()).histogram()
    assert rows[0] == (1, 2, 1)
    assert rows[-1] == (512, 1024, 1)
    for lo, hi, count in rows:
        assert count == sum(lo <= length < hi for length in lengths)


def test_text_that_the_tokenizer_cannot_spell_is_reported_or_dropped(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    poor = write_tokenizer(tmp_path / "poor", list(alphabet - {"x"}))
    arguments = [str(tmp_path / "set"), str(corpus), "--glob", "[ab].py", "--tokenizer", str(poor)]
    (corpus / "b.py").write_text("fine")
    assert preprocess.main(arguments) == 0
    assert "1 warning: tokens do not decode to the text (kept)" in capsys.readouterr().out
    assert preprocess.main([*arguments, "--overwrite", "--drop-lossy"]) == 0
    assert "dropped 1: tokens do not decode to the text" in capsys.readouterr().out
    assert read_back(tmp_path / "set", poor) == [("fine", 0)]


def test_megatron_builds_samples_from_the_dataset(
    run: Callable[..., int], corpus: Path, tmp_path: Path
) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    assert run(corpus, *PYTHON) == 0
    prefix = str(tmp_path / "data/set")
    names = {"eod": 0, "pad": -1, "vocab_size": 258, "unique_identifiers": {"name": "bytes"}}
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=128,
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=SimpleNamespace(**names),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [10, 0, 0], lambda: True, config)
    train = builder.build()[0]
    documents = {row.tobytes() for row in read_rows(Path(prefix))}
    num_checked = 0
    for index in range(len(train)):
        tokens, labels = train[index]["tokens"].numpy(), train[index]["labels"].numpy()
        assert np.array_equal(tokens[1:], labels[:-1])
        ends = np.flatnonzero(tokens == 0) + 1
        for document in np.split(tokens, ends)[1:-1]:  # the whole documents inside the sample
            assert document.tobytes() in documents
            num_checked += 1
    assert num_checked >= 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "do not exist"),
        (("corpus", "--glob", "*.rs"), "hold no file for glob='*.rs'"),
        (("corpus/empty.py",), "gave 0 documents with 0 tokens, dropped {'empty': 1}"),
        (("corpus/a.py", "--min-tokens", "1000"), "min_tokens=1000 are needed"),
        (("corpus/a.py", "--eos-token", "<eos>"), "eos_token='<eos>' is not in the vocabulary"),
        (("corpus/a.py", "--workers", "0"), "workers=0 must be at least 1"),
        (("corpus/a.py", "--tokenizer", "nowhere"), "tokenizer=nowhere is not a directory"),
        (("corpus/a.py", "--tokenizer", "corpus"), "tokenizer=corpus does not load"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    run: Callable[..., int],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("data/*"))


def test_an_existing_dataset_is_kept_unless_overwritten(
    run: Callable[..., int], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(corpus / "a.py") == 0
    first = (tmp_path / "data/set.bin").read_bytes()
    assert run(corpus / "d.py") == 1
    assert "pass --overwrite or a new prefix" in capsys.readouterr().err
    assert run(corpus / "a.py", "--overwrite", "--min-tokens", "1000") == 1  # fails after encoding
    assert (tmp_path / "data/set.bin").read_bytes() == first
    assert run(corpus / "d.py", "--overwrite") == 0
    assert (tmp_path / "data/set.bin").read_bytes() != first
