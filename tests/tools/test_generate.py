"""What tools/generate.py and the cached sampler guarantee, on a random tiny Llama."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tools.test_fill_blocks import (
    BLOCK,
    LENGTH,
    MASK,
    VOCAB,
    block_filling,
    directory,
    make_model,
    make_rules,
    model,
    train_logits,
)

__all__ = ["directory", "model"]  # fixtures

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
generate_tool = importlib.import_module("generate")

RULES = [
    (rule, alignment)
    for rule in block_filling.CHOICES["clean_rule"]
    for alignment in block_filling.CHOICES["logit_alignment"]
]


class Recorded(block_filling.PrefixDecoder):  # type: ignore[name-defined, misc]
    """Keeps every block that was asked for, with the prefix length and the logits."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def logits(self, block: torch.Tensor) -> torch.Tensor:
        logits = super().logits(block)
        self.asked.append((self.length, block.clone(), logits.clone()))
        return logits


def generate(decoder: Any, prompt: torch.Tensor, num_new: int, **given: Any) -> torch.Tensor:
    how = block_filling.Sampling(
        given.get("num_steps", BLOCK),
        given.get("num_ids", VOCAB),
        given.get("threshold", 0.9),
        given.get("temperature", 0.0),
    )
    random = torch.Generator().manual_seed(given.get("seed", 0))
    return block_filling.generate(decoder, prompt, num_new, how, given.get("stops", ()), random)


def prompts() -> Iterator[torch.Tensor]:
    """Prompts that end in a block, at its end, and in the first block."""
    generator = torch.Generator().manual_seed(5)
    for length in (9, 8, 2):
        yield torch.randint(0, MASK, (length,), generator=generator)


@pytest.mark.parametrize(("clean_rule", "alignment"), RULES)
def test_every_step_s_logits_are_those_of_the_training_forward(
    model: Any, clean_rule: str, alignment: str
) -> None:
    """1e-5 of logits of size ten: transformers keeps norms and rotary tables in fp32."""
    for prompt in prompts():
        decoder = Recorded(model, make_rules(clean_rule, alignment))
        tokens = generate(decoder, prompt, LENGTH - len(prompt), num_steps=2)
        assert len({start for start, _, _ in decoder.asked}) > 3  # from prompt to the last block
        for start, block, logits in decoder.asked:
            stop = min(start + BLOCK, LENGTH)
            if stop < start + BLOCK:
                continue  # the tail is cut off; training would see a shorter block
            corrupted = torch.cat([tokens[:start], block, tokens[stop:]])
            reference = train_logits(model, tokens, corrupted, clean_rule)
            shift = alignment == "shifted"
            first = max(start, 1) if shift else start
            wanted = reference[first - shift : stop - shift]
            torch.testing.assert_close(logits[first - start :], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("clean_rule", "alignment"), RULES)
def test_the_cache_changes_nothing(model: Any, clean_rule: str, alignment: str) -> None:
    """Extended block by block or at once; also after other blocks were asked for in between."""
    rules, clean = make_rules(clean_rule, alignment), torch.arange(4 * BLOCK)
    block = torch.tensor([MASK, 7, MASK, MASK])
    at_once, step_by_step = (block_filling.PrefixDecoder(model, rules) for _ in range(2))
    at_once.extend(clean)
    for part in clean.split(BLOCK):
        step_by_step.logits(block)
        step_by_step.extend(part)
    torch.testing.assert_close(step_by_step.logits(block), at_once.logits(block), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="3 tokens are not whole blocks of 4"):
        at_once.extend(clean[:3])


@pytest.mark.parametrize("alignment", block_filling.CHOICES["logit_alignment"])
@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_the_prompt_stays_and_no_mask_or_foreign_id_is_emitted(
    model: Any, alignment: str, temperature: float
) -> None:
    for prompt in prompts():
        rules = make_rules(alignment=alignment)
        for limit in (VOCAB, 5):
            given = {"num_ids": limit, "temperature": temperature}
            tokens = generate(block_filling.PrefixDecoder(model, rules), prompt, 11, **given)
            assert torch.equal(tokens[: len(prompt)], prompt)
            assert len(tokens) == len(prompt) + 11
            assert (tokens != MASK).all()
            assert (tokens[len(prompt) :] < limit).all()


def test_a_seed_decides_the_draws(model: Any) -> None:
    prompt = next(prompts())
    texts = [
        generate(block_filling.PrefixDecoder(model, make_rules()), prompt, 12, **given)
        for given in (
            {"temperature": 5.0, "seed": 1},
            {"temperature": 5.0, "seed": 1},
            {"temperature": 5.0, "seed": 2},
            {"temperature": 1e-4, "seed": 1},
            {},
        )
    ]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])
    assert torch.equal(texts[3], texts[4])  # temperature towards 0 takes the likeliest


def test_a_low_threshold_and_few_steps_need_fewer_forward_passes(model: Any) -> None:
    prompt = torch.arange(2 * BLOCK)
    passes = []
    for threshold, num_steps in ((2.0, BLOCK), (1e-9, BLOCK), (2.0, 2)):
        decoder = block_filling.PrefixDecoder(model, make_rules())
        generate(decoder, prompt, 2 * BLOCK, threshold=threshold, num_steps=num_steps)
        passes.append(decoder.num_forwards)
    assert passes == [2 + 2 * BLOCK, 2 + 2, 2 + 4]  # prompt and first block go to the cache


def test_text_ends_with_the_first_stop_token(model: Any) -> None:
    prompt = next(prompts())
    whole = generate(block_filling.PrefixDecoder(model, make_rules()), prompt, 12)
    at = len(prompt) + 5
    stop = int(whole[at])
    first = int((whole[len(prompt) :] == stop).nonzero()[0]) + len(prompt)
    decoder = block_filling.PrefixDecoder(model, make_rules())
    tokens = generate(decoder, prompt, 12, stops=(stop,))
    assert torch.equal(tokens, whole[: first + 1])


def test_the_command_prints_the_text_and_tokens_per_forward(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.py").write_text("abcdef")
    for source in (["--prompt", "abcdef"], ["--file", str(tmp_path / "code.py")]):
        arguments = [str(directory), *source, "--max-new-tokens", "6", "--threshold", "2"]
        assert generate_tool.main([*arguments, "--ignore-eos"]) == 0
        printed = capsys.readouterr()
        assert printed.out.startswith("abcdef")
        # one pass for the prompt's whole block, 2 + 4 for two blocks, one for the first of them
        assert "=== 6 new tokens, 8 forward passes: 0.75 tokens per forward" in printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "an empty prompt"),
        (("--prompt", "a", "--max-new-tokens", "0"), "max_new_tokens=0 must be at least 1"),
        (
            ("--prompt", "a", "--max-new-tokens", "128"),
            "132 tokens (whole blocks) exceed the model",
        ),
        (("--prompt", "a", "--threshold", "0"), "threshold=0.0 must be above 0"),
        (("--prompt", "a", "--steps", "-1"), "steps=-1 must be at least 1"),
        (("--prompt", "a", "--temperature", "-1"), "temperature=-1.0 must be 0 or more"),
        (("--prompt", "a", "--mask-token-id", "300"), "must be in [0, vocab_size=300)"),
        (("--prompt", "aa", "--mask-token-id", "65"), "the prompt contains the mask token"),
        (("--file", "nowhere.py"), "nowhere.py"),
    ],
)
def test_mistakes_are_named(
    directory: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    given = arguments if "--max-new-tokens" in arguments else (*arguments, "--max-new-tokens", "8")
    assert generate_tool.main([str(directory), *given]) == 1
    assert message in capsys.readouterr().err


def test_the_reference_model_is_far_from_uniform() -> None:
    with torch.no_grad():
        assert make_model()(torch.arange(LENGTH)[None]).logits.std() > 1
