#!/usr/bin/env python3
"""Continues text with an exported block-diffusion model: denoises block after block.

    generate.py MODEL_DIR --prompt "def add(a, b):" --max-new-tokens 64
    generate.py MODEL_DIR --file module.py --threshold 0.8 --temperature 0.7 --seed 1

Keys and values of finished blocks are computed once. Each forward pass commits every token at
least as probable as the threshold, and at least an equal share, so that a block is done after
--steps passes. Block size, mask id and mask rules come from the directory.
Specified by tests/tools/test_generate.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from block_filling import (
    CHOICES,
    PrefixDecoder,
    Sampling,
    Semantics,
    generate,
    load,
    read_semantics,
)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; values that override the directory's are absent unless given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="Hugging Face directory with tokenizer")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue")
    source.add_argument("--file", type=Path, help="file with the text to continue")
    add("--max-new-tokens", type=int, default=128, help="(default %(default)s)")
    add("--steps", type=int, default=0, help="forward passes a block at most (default block size)")
    add("--threshold", type=float, default=0.9, help="probability (default %(default)s)")
    add("--temperature", type=float, default=0.0, help="0: the likeliest token (default)")
    add("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    add("--ignore-eos", action="store_true", help="go on after the end of the text")
    add("--device", default="cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    for name, known in CHOICES.items():
        add(f"--{name.replace('_', '-')}", choices=known, default=argparse.SUPPRESS)
    for name in ("block_size", "mask_token_id"):
        add(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def check(prompt: torch.Tensor, num_new: int, rules: Semantics, model: Any) -> None:
    """Returns if the request can be met.

    Raises: ValueError that lists every problem.
    """
    problems = []
    config = model.config
    if not 0 <= rules.mask_token_id < config.vocab_size:
        problems.append(
            f"mask_token_id={rules.mask_token_id} must be in [0, vocab_size={config.vocab_size})."
        )
    if num_new < 1:
        problems.append(f"max_new_tokens={num_new} must be at least 1, for example 128.")
    total = -(-(len(prompt) + num_new) // rules.block_size) * rules.block_size
    if total > config.max_position_embeddings:
        problems.append(
            f"{total} tokens (whole blocks) exceed the model's {config.max_position_embeddings}; "
            "use a shorter prompt or fewer new tokens."
        )
    if (prompt == rules.mask_token_id).any():
        problems.append("the prompt contains the mask token; remove it, or use fill_blocks.py.")
    if problems:
        raise ValueError(" ".join(problems))


def stop_ids(model: Any, tokenizer: Any) -> list[int]:
    """The ids that end a text: the tokenizer's and those of the generation settings."""
    ends = model.generation_config.eos_token_id
    found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    return sorted(token for token in found if token is not None)


def run(args: argparse.Namespace) -> None:
    """Loads, generates and prints."""
    rules = read_semantics(args.model, vars(args))
    model, tokenizer = load(args.model, args.dtype, args.device)
    text = args.prompt if args.file is None else args.file.read_bytes().decode("utf-8")
    prompt = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.long)
    check(prompt, args.max_new_tokens, rules, model)
    how = Sampling(args.steps or rules.block_size, len(tokenizer), args.threshold, args.temperature)
    decoder = PrefixDecoder(model, rules)
    stops = [] if args.ignore_eos else stop_ids(model, tokenizer)
    random = torch.Generator().manual_seed(args.seed)
    begin = time.perf_counter()
    tokens = generate(decoder, prompt, args.max_new_tokens, how, stops, random)
    seconds, new = time.perf_counter() - begin, len(tokens) - len(prompt)
    print(tokenizer.decode(tokens))
    print(
        f"=== {new} new tokens, {decoder.num_forwards} forward passes: "
        f"{new / decoder.num_forwards:.2f} tokens per forward, {new / seconds:.1f} tokens/s; "
        f"{rules}",
        file=sys.stderr,
    )


def main(arguments: list[str]) -> int:
    """Generates and prints, or says what is wrong with the request."""
    try:
        run(parse(arguments))
    except (ValueError, OSError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
