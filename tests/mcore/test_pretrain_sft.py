"""Training on packed chats: equal on one and two ranks, after a resume, and at variable length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.mcore.runs import train_jobs
from tests.mcore.test_pretrain_data import on


def chats(prefix: Path, num_documents: int) -> Path:
    """Documents of 4 to 40 tokens whose first third is a prompt, with PREFIX_mask."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    drawn = np.random.Generator(np.random.Philox(key=6))
    tokens = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    mask = IndexedDatasetBuilder(f"{prefix}_mask.bin", dtype=np.uint8)
    for _ in range(num_documents):
        length = int(drawn.integers(4, 41))
        tokens.add_document(drawn.integers(0, 120, length).astype(np.uint16), [length])
        mask.add_document((np.arange(length) >= length // 3).astype(np.uint8), [length])
    tokens.finalize(f"{prefix}.idx")
    mask.finalize(f"{prefix}_mask.idx")
    return prefix


def test_packed_chats_train_alike_on_one_and_two_ranks_and_after_a_resume(tmp_path: Path) -> None:
    prefix = chats(tmp_path / "chats", 60)
    given = on(str(prefix), "--bdlm-data sft")
    short = [*given, "--bdlm-length-multiple", "16"]
    layout = ["--context-parallel-size", "2", "--block-parallel-size", "2"]
    one = train_jobs(1, [("whole", given)], tmp_path / "one")
    saved = f"--save {tmp_path}/run --save-interval 2".split()
    jobs = [
        ("first", [*given, *layout, *saved, "--exit-interval", "2"]),
        ("then", [*given, *layout, "--load", f"{tmp_path}/run"]),
        ("short", [*short, *layout]),
    ]
    two = train_jobs(2, jobs, tmp_path / "two")
    losses = [step["bdlm loss"] for step in one["whole"]]
    assert len(set(losses)) == 4
    assert [s["bdlm loss"] for s in two["first"] + two["then"]] == pytest.approx(losses, rel=2e-7)
    assert [step["bdlm loss"] for step in two["short"]] == pytest.approx(losses, rel=1e-6)
