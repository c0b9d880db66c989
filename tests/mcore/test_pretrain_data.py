"""Training on a real indexed dataset: documents, blends, and a corpus shorter than one sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mcore.runs import flags, train_jobs

END = 126  # NullTokenizer's end of document for --vocab-size 127


def corpus(prefix: Path, num_documents: int, document_tokens: int) -> Path:
    """Writes Megatron's indexed dataset with documents of random tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    drawn = np.random.Generator(np.random.Philox(key=5))
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(num_documents):
        tokens = np.append(drawn.integers(0, 120, document_tokens), END)
        builder.add_document(tokens.astype(np.uint16), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def on(prefix: str, extra: str = "") -> list[str]:
    given = [flag for flag in flags("") if flag != "--mock-data"]
    return [*given, *f"--data-path {prefix} --split 80,10,10 {extra}".split()]


def test_a_corpus_trains_alike_on_one_and_two_ranks(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "corpus", 60, 30)
    packed = f"--reset-attention-mask --eod-mask-loss --data-cache-path {tmp_path}/cache"
    jobs = [("plain", on(str(prefix))), ("packed", on(str(prefix), packed))]
    layout = ["--context-parallel-size", "2", "--block-parallel-size", "2"]
    one = train_jobs(1, jobs, tmp_path / "one")
    two = train_jobs(2, [(name, [*given, *layout]) for name, given in jobs], tmp_path / "two")
    for name in one:
        got = [step["bdlm loss"] for step in two[name]]
        assert got == pytest.approx([step["bdlm loss"] for step in one[name]], rel=2e-7)
    assert one["plain"][0]["bdlm loss"] != one["packed"][0]["bdlm loss"]


def test_a_corpus_shorter_than_one_sample_is_refused(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "short", 10, 20)
    with pytest.raises(RuntimeError) as error:
        train_jobs(1, [("short", on(str(prefix), f"--data-cache-path {tmp_path}/cache"))], tmp_path)
    text = str(error.value)
    assert "2 problems with the arguments" in text, "the validation and the test split"
    assert "has 21 tokens, fewer than one sample of --seq-length 48 (+ 1)" in text
    assert "use --seq-length 20 or less" in text
