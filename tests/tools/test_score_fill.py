"""What tools/score_fill.py counts, on a random tiny Llama and small texts."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.test_fill_blocks import (
    LENGTH,
    MASK,
    VOCAB,
    block_filling,
    directory,
    make_rules,
    model,
    train_logits,
)

__all__ = ["directory", "model"]  # fixtures

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
score_fill = importlib.import_module("score_fill")

SOURCE = '''\
import os


def short():
    return 1


class Thing:
    def method(self, a,
               b):
        """Says something."""
        c = a + b
        return c


def plain(x):
    y = x
    return y
'''


@pytest.mark.parametrize("clean_rule", block_filling.CHOICES["clean_rule"])
@pytest.mark.parametrize("alignment", block_filling.CHOICES["logit_alignment"])
def test_predictions_are_those_of_the_training_forward(
    model: Any, clean_rule: str, alignment: str
) -> None:
    clean = torch.randint(0, MASK, (LENGTH,), generator=torch.Generator().manual_seed(2))
    corrupted = clean.masked_fill(score_fill.draw_masks(LENGTH, 0.5, 1, 0), MASK)
    rules = make_rules(clean_rule, alignment)
    logits = train_logits(model, clean, corrupted, clean_rule)
    logits[:, MASK] = float("-inf")
    wanted = logits.argmax(-1)
    found = score_fill.predictions(model, clean, corrupted, rules, VOCAB)
    if alignment == "shifted":
        assert torch.equal(found[1:], wanted[:-1])
    else:
        assert torch.equal(found, wanted)


def test_accuracy_counts_masked_positions_that_are_predicted(monkeypatch: Any) -> None:
    files = [torch.arange(40), torch.arange(40) + 7]

    def even_ones(model: Any, clean: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.where(clean % 2 == 0, clean, clean + 1)

    monkeypatch.setattr(score_fill, "predictions", even_ones)
    right, total = score_fill.masked_accuracy(None, files, 0.5, make_rules(), VOCAB)
    masks = [score_fill.draw_masks(40, 0.5, seed, 0) for seed in (0, 1)]
    assert total == sum(int(mask.sum()) for mask in masks)
    assert right == sum(
        int((clean[mask] % 2 == 0).sum()) for clean, mask in zip(files, masks, strict=True)
    )
    assert 0.3 < total / 80 < 0.7


def test_masks_depend_on_the_seed_and_are_never_empty() -> None:
    assert torch.equal(score_fill.draw_masks(50, 0.5, 3, 1), score_fill.draw_masks(50, 0.5, 3, 1))
    assert not torch.equal(
        score_fill.draw_masks(50, 0.5, 3, 1), score_fill.draw_masks(50, 0.5, 4, 1)
    )
    for seed in range(20):
        masked = score_fill.draw_masks(3, 0.01, seed, 1)
        assert masked.any()
        assert not masked[0]


def test_headers_end_before_the_first_statement() -> None:
    found = list(score_fill.headers(SOURCE))
    assert found == [
        "def plain(x):\n",
        'def method(self, a,\n           b):\n    """Says something."""\n',
    ]
    for header in found:
        ast.parse(header + "    pass\n")


def test_functions_stand_at_the_left_margin() -> None:
    found = list(score_fill.functions(SOURCE))
    assert found[0] == "def short():\n    return 1\n"
    assert found[2].startswith('def method(self, a,\n           b):\n    """Says')
    assert all(score_fill.is_python(text) for text in found)


def test_restoring_keeps_what_is_shown_and_fills_what_is_masked(model: Any) -> None:
    rules = make_rules()
    clean = torch.randint(0, MASK, (LENGTH - 3,), generator=torch.Generator().manual_seed(5))
    masked = score_fill.draw_masks(len(clean), 0.5, 1, 0)
    decoder = block_filling.PrefixDecoder(model, rules)
    how = block_filling.Sampling(2, VOCAB)
    restored = score_fill.restore(decoder, clean.masked_fill(masked, MASK), how)
    assert torch.equal(restored[~masked], clean[~masked])
    assert not (restored == MASK).any()
    # The second block was sampled after the restored first one, as one who knows it would.
    size = rules.block_size
    again = block_filling.PrefixDecoder(model, rules)
    again.extend(restored[:size])
    block = clean.masked_fill(masked, MASK)[size : 2 * size]
    wanted = block_filling.fill_block(again, block, how, torch.Generator())
    assert torch.equal(restored[size : 2 * size], wanted)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("    return 1\n", True),
        ("    return 1\n    x = (", True),  # the last line is not complete
        ("    return (1\n", False),
        ("    x = 1\n  y = 2\n", False),
        ("    x = '\0'\n", False),
        ("", False),
        ("    )(", False),  # the docstring alone would be Python
        ("\n\n  )", False),
    ],
)
def test_complete_lines_must_be_python_and_there_must_be_one(written: str, expected: bool) -> None:
    assert score_fill.is_valid('def f():\n    """Docstring."""\n', written) is expected


def test_the_command_prints_a_row_for_each_model(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.py").write_text(SOURCE)
    arguments = [str(directory), str(directory), "--files", str(tmp_path)]
    numbers = ["--length", "32", "--snippets", "2", "--max-new-tokens", "4"]
    target = tmp_path / "scores.json"
    assert score_fill.main([*arguments, *numbers, "--json", str(target)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| model | masked 25% | masked 50% | masked 75% | restored is")
    assert len(lines) == 4
    assert lines[2] == lines[3]
    one, other = json.loads(target.read_text())
    assert one == other
    assert one["num_snippets"] == 2
    assert one["num_restored"] == 2
    assert set(one["accuracy"]) == {"0.25", "0.5", "0.75"}
    again = [str(target), "--files", str(tmp_path), "--json", str(tmp_path / "again.json")]
    assert score_fill.main(again) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert score_fill.main([*arguments, "--json", str(target)]) == 1
    assert "1 files: 0 of 512 tokens or more" in capsys.readouterr().err
