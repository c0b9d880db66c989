#!/usr/bin/env python3
"""Scores exported block-diffusion models on Python files that they were not trained on.

    score_fill.py BEFORE_DIR AFTER_DIR --files library/email --json scores.json

A model may also be the JSON file of an earlier call.
*Masked-token accuracy*: the share of masked tokens whose likeliest prediction is the original, at
several mask rates; masks depend on the seed only. All blocks are masked at once, as in training.
*Restored code*: of whole functions a share of the tokens is masked and sampled, block by block; the
share of functions that `ast.parse` accepts then.
*Valid code*: functions are continued after their header and docstring; the share of texts that
`ast.parse` accepts, one new line at least, without the last one if it is not complete.
Specified by tests/tools/test_score_fill.py.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from block_filling import (
    PrefixDecoder,
    Sampling,
    Semantics,
    allowed_pairs,
    fill_block,
    generate,
    load,
    read_semantics,
)
from generate import stop_ids

RESTORED_TOKENS = range(24, 129)  # shorter functions are Python whatever is put into them


@dataclass(frozen=True)
class Score:
    """One model's numbers: accuracy by mask rate, and how many texts are valid code."""

    model: str
    accuracy: dict[str, float]
    num_masked: dict[str, int]
    restored_share: float
    num_restored: int
    valid_share: float
    num_snippets: int
    tokens_per_forward: float


def draw_masks(length: int, rate: float, seed: int, first: int) -> torch.Tensor:
    """bool [length]: each position from `first` on with probability `rate`, at least one."""
    random = torch.Generator().manual_seed(seed)
    masked = torch.rand(length, generator=random) < rate
    masked[:first] = False
    if not masked.any():
        masked[int(torch.randint(first, length, (1,), generator=random))] = True
    return masked


@torch.no_grad()
def predictions(
    model: Any, clean: torch.Tensor, corrupted: torch.Tensor, rules: Semantics, num_ids: int
) -> torch.Tensor:
    """The likeliest id of each position [L] (that of the position before, if shifted)."""
    length = len(clean)
    position = torch.arange(length).repeat(2)
    hidden = ~allowed_pairs(position, torch.arange(2 * length) >= length, rules)
    bias = torch.zeros(hidden.shape, dtype=model.dtype)
    bias.masked_fill_(hidden, torch.finfo(model.dtype).min)
    output = model(
        input_ids=torch.cat([clean, corrupted])[None].to(model.device),
        position_ids=position[None].to(model.device),
        attention_mask=bias[None, None].to(model.device),
        use_cache=False,
        logits_to_keep=length,
    )
    logits = output.logits[0].float()
    logits[:, num_ids:] = float("-inf")
    logits[:, rules.mask_token_id] = float("-inf")
    found: torch.Tensor = logits.argmax(-1).cpu()
    return found.roll(1) if rules.logit_alignment == "shifted" else found


def masked_accuracy(
    model: Any, files: Sequence[torch.Tensor], rate: float, rules: Semantics, num_ids: int
) -> tuple[int, int]:
    """(masked tokens that are predicted, masked tokens) of all files."""
    right = total = 0
    first = int(rules.logit_alignment == "shifted")  # nothing predicts position 0
    for seed, clean in enumerate(files):
        masked = draw_masks(len(clean), rate, seed, first)
        corrupted = clean.masked_fill(masked, rules.mask_token_id)
        equal = predictions(model, clean, corrupted, rules, num_ids) == clean
        right, total = right + int(equal[masked].sum()), total + int(masked.sum())
    return right, total


def headers(source: str) -> Iterator[str]:
    """The text of each function up to its first statement after the docstring."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        has_docstring = ast.get_docstring(node) is not None
        if len(node.body) < 2 + has_docstring:
            continue
        stop = (node.body[0].end_lineno if has_docstring else node.body[0].lineno - 1) or 0
        yield textwrap.dedent("".join(lines[node.lineno - 1 : stop]))


def functions(source: str) -> Iterator[str]:
    """The text of each function, at the left margin."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))


def restore(decoder: PrefixDecoder, masked: torch.Tensor, how: Sampling) -> torch.Tensor:
    """The tokens with every mask replaced, block by block after the restored text before it."""
    size, restored = decoder.rules.block_size, masked.clone()
    for start in range(0, len(masked), size):
        block = fill_block(decoder, masked[start : start + size], how, torch.Generator())
        restored[start : start + size] = block
        if start + size < len(masked):
            decoder.extend(block)
    return restored


def is_python(text: str) -> bool:
    """Whether `ast.parse` accepts the text."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def is_valid(prompt: str, written: str) -> bool:
    """Whether prompt and the complete lines of its continuation are Python, one at least."""
    lines = written[: written.rfind("\n") + 1]
    return bool(lines.strip()) and is_python(prompt + lines)


def shuffled(texts: Sequence[str], seed: int) -> list[str]:
    """The texts in an order that the seed and their number decide."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return [texts[index] for index in order.tolist()]


def restored_functions(
    model: Any, tokenizer: Any, sources: Sequence[str], args: argparse.Namespace, rules: Semantics
) -> tuple[int, int]:
    """(functions that are Python after their masked tokens were sampled, functions)."""
    first = int(rules.logit_alignment == "shifted")
    how = Sampling(args.steps or rules.block_size, len(tokenizer), args.threshold)
    valid = number = 0
    for text in shuffled([text for source in sources for text in functions(source)], args.seed):
        tokens = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        # A function nested in strings or decorators may not stand alone: then it says nothing.
        if len(tokens) not in RESTORED_TOKENS or not is_python(text):
            continue
        masked = draw_masks(len(tokens), args.restored_rate, number, first)
        shown = tokens.masked_fill(masked, rules.mask_token_id)
        valid += is_python(tokenizer.decode(restore(PrefixDecoder(model, rules), shown, how)))
        number += 1
        if number == args.snippets:
            break
    return valid, number


def score(directory: Path, args: argparse.Namespace) -> Score:
    """All numbers of one model."""
    rules = read_semantics(directory, {})
    model, tokenizer = load(directory, args.dtype, args.device)

    def encode(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)

    paths = sorted(path for root in args.files for path in root.rglob("*.py"))
    sources = [path.read_text(encoding="utf-8") for path in paths]
    texts = [encode(source)[: args.length] for source in sources]
    texts = [text for text in texts if len(text) == args.length][: args.max_files]
    prompts = [header for source in sources for header in headers(source)]
    prompts = shuffled(prompts, args.seed)[: args.snippets]
    if not texts or not prompts:
        raise ValueError(
            f"{len(paths)} files: {len(texts)} of {args.length} tokens or more, and "
            f"{len(prompts)} functions; give more files, or a shorter --length."
        )
    counts = {
        rate: masked_accuracy(model, texts, rate, rules, len(tokenizer)) for rate in args.rates
    }
    shares = ", ".join(
        f"{rate:.0%}: {right / total:.1%}" for rate, (right, total) in counts.items()
    )
    print(f"{directory.name}: of tokens masked at {shares} are predicted", file=sys.stderr)
    restored, num_restored = restored_functions(model, tokenizer, sources, args, rules)
    how = Sampling(args.steps or rules.block_size, len(tokenizer), args.threshold)
    valid = new = passes = 0
    for prompt in prompts:
        decoder, start = PrefixDecoder(model, rules), encode(prompt)
        ends = stop_ids(model, tokenizer)
        tokens = generate(decoder, start, args.max_new_tokens, how, ends, torch.Generator())
        written = tokenizer.decode(tokens[len(start) :], skip_special_tokens=True)
        valid += is_valid(prompt, written)
        new, passes = new + len(tokens) - len(start), passes + decoder.num_forwards
    return Score(
        model=directory.name,
        accuracy={str(rate): right / total for rate, (right, total) in counts.items()},
        num_masked={str(rate): total for rate, (_, total) in counts.items()},
        restored_share=restored / max(num_restored, 1),
        num_restored=num_restored,
        valid_share=valid / len(prompts),
        num_snippets=len(prompts),
        tokens_per_forward=new / passes,
    )


def scores_of(model: Path, args: argparse.Namespace) -> list[Score]:
    """The scores of a model directory, or those that an earlier call wrote."""
    if model.suffix != ".json":
        return [score(model, args)]
    return [Score(**one) for one in json.loads(model.read_text(encoding="utf-8"))]


def table(scores: Sequence[Score]) -> str:
    """The scores as a Markdown table."""
    rates = list(scores[0].accuracy)
    heads = [f"masked {float(rate):.0%}" for rate in rates]
    heads += ["restored is Python", "continued is Python", "tokens a forward"]
    rows = [["model", *heads], ["---"] * (len(heads) + 1)]
    for one in scores:
        accuracy = [f"{one.accuracy[rate]:.1%}" for rate in rates]
        restored = f"{one.restored_share:.1%} of {one.num_restored}"
        valid = f"{one.valid_share:.1%} of {one.num_snippets}"
        rows.append([one.model, *accuracy, restored, valid, f"{one.tokens_per_forward:.2f}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("models", type=Path, nargs="+", help="Hugging Face directories, or JSON of earlier calls")
    add("--files", type=Path, nargs="+", required=True, help="folders of held-out Python files")
    add("--max-files", type=int, default=16, help="for the accuracy (default %(default)s)")
    add("--length", type=int, default=512, help="tokens of each file (default %(default)s)")
    add("--rates", type=float, nargs="+", default=[0.25, 0.5, 0.75], help="mask rates")
    add("--snippets", type=int, default=32, help="functions to restore, and as many to continue")
    add("--restored-rate", type=float, default=0.25, help="share of their tokens that is masked")
    add("--max-new-tokens", type=int, default=64, help="of each (default %(default)s)")
    add("--steps", type=int, default=0, help="forward passes a block (default: block size)")
    add("--threshold", type=float, default=0.9, help="probability (default %(default)s)")
    add("--seed", type=int, default=0, help="chooses the functions (default %(default)s)")
    add("--json", type=Path, default=Path("scores.json"), help="(default %(default)s)")
    add("--device", default="cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """Scores every model; prints the table and writes the JSON."""
    args, begin = parse(arguments), time.perf_counter()
    try:
        scores = [one for model in args.models for one in scores_of(model, args)]
    except (ValueError, OSError) as error:
        print(f"score_fill: {error}", file=sys.stderr)
        return 1
    args.json.write_text(json.dumps([asdict(one) for one in scores], indent=2) + "\n")
    print(table(scores))
    print(f"{time.perf_counter() - begin:.0f} s; written to {args.json}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
