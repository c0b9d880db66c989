#!/usr/bin/env python3
"""Reloads an exported block-diffusion model in transformers and fills masked blocks of code.

Mask a part of a file, and compare with what the file says:
    fill_blocks.py MODEL_DIR --file module.py --block 3 --mask-rate 0.5
or continue a prompt to the end of its block, and beyond:
    fill_blocks.py MODEL_DIR --prompt "def add(a, b):" --num-blocks 2
Blocks are filled left to right; block size, mask id and mask rules come from the directory.
A model trained for a short time writes poor code; this shows what it has learnt, no more.
Specified by tests/tools/test_fill_blocks.py.
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
    fill_block,
    load,
    read_semantics,
)

SHOWN_TAIL = 800  # characters of the prompt that are printed


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; values that override the directory's are absent unless given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", type=Path, help="Hugging Face directory with tokenizer")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--file", type=Path, help="text of which one block is masked")
    source.add_argument("--prompt", help="text to continue")
    add("--block", type=int, default=1, help="block of --file to mask (default %(default)s)")
    add("--mask-rate", type=float, default=1.0, help="part of its tokens (default %(default)s)")
    add("--num-blocks", type=int, default=1, help="blocks to fill after --prompt, its own included")
    add("--steps", type=int, default=8, help="denoising steps a block (default %(default)s)")
    add("--seed", type=int, default=0, help="chooses the masked tokens (default %(default)s)")
    add("--device", default="cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    for name, known in CHOICES.items():
        add(f"--{name.replace('_', '-')}", choices=known, default=argparse.SUPPRESS)
    for name in ("block_size", "mask_token_id"):
        add(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def mask_file(tokens: torch.Tensor, args: argparse.Namespace, rules: Semantics) -> torch.Tensor:
    """The tokens up to the end of the chosen block, a seeded part of that block masked."""
    num_blocks = -(-len(tokens) // rules.block_size)
    if not 0 <= args.block < num_blocks:
        raise ValueError(f"block={args.block} must be in [0, {num_blocks}) for this file.")
    if not 0 < args.mask_rate <= 1:
        raise ValueError(f"mask_rate={args.mask_rate} must be in (0, 1], for example 0.5.")
    start = args.block * rules.block_size
    canvas = tokens[: start + rules.block_size].clone()
    skipped = int(start == 0 and rules.logit_alignment == "shifted")  # nothing predicts token 0
    length = len(canvas) - start - skipped
    order = torch.randperm(length, generator=torch.Generator().manual_seed(args.seed))
    masked = order[: max(1, round(args.mask_rate * length))] + start + skipped
    canvas[masked] = rules.mask_token_id
    return canvas


def extend_prompt(tokens: torch.Tensor, num_blocks: int, rules: Semantics) -> torch.Tensor:
    """The prompt and masks up to the end of the last of `num_blocks` blocks."""
    if num_blocks < 1 or not len(tokens):
        raise ValueError(f"num_blocks={num_blocks} and a prompt of {len(tokens)} tokens: need 1.")
    stop = (len(tokens) // rules.block_size + num_blocks) * rules.block_size
    return torch.cat([tokens, torch.full((stop - len(tokens),), rules.mask_token_id)])


def show(tokenizer: Any, tokens: torch.Tensor, mask_token_id: int) -> str:
    """The text of the tokens, every mask as <?>."""
    pieces: list[list[int]] = [[]]
    for token in tokens.tolist():
        if token == mask_token_id:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return "<?>".join(tokenizer.decode(piece) for piece in pieces)


def run(args: argparse.Namespace) -> None:
    """Loads, masks, fills block by block and prints."""
    rules = read_semantics(args.model, vars(args))
    model, tokenizer = load(args.model, args.dtype, args.device)
    text = args.prompt if args.file is None else args.file.read_bytes().decode("utf-8")
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids, dtype=torch.long)
    if args.file is None:
        canvas = extend_prompt(tokens, args.num_blocks, rules)
    else:
        canvas = mask_file(tokens, args, rules)
    if not 0 <= rules.mask_token_id < model.config.vocab_size:
        size = model.config.vocab_size
        raise ValueError(f"mask_token_id={rules.mask_token_id} must be in [0, vocab_size={size}).")
    if len(canvas) > model.config.max_position_embeddings:
        limit = model.config.max_position_embeddings
        raise ValueError(f"{len(canvas)} tokens exceed the model's {limit}; use an earlier block.")
    masked = canvas == rules.mask_token_id
    first = int(masked.nonzero()[0]) // rules.block_size * rules.block_size
    print(f"=== {rules}")
    print(f"=== prompt ({first} tokens, its end)\n{tokenizer.decode(canvas[:first])[-SHOWN_TAIL:]}")
    print(f"=== masked\n{show(tokenizer, canvas[first:], rules.mask_token_id)}")
    begin = time.perf_counter()
    decoder, how = PrefixDecoder(model, rules), Sampling(args.steps, len(tokenizer))
    for lo in range(first, len(canvas), rules.block_size):
        decoder.extend(canvas[decoder.length : lo])
        block = canvas[lo : lo + rules.block_size]
        canvas[lo : lo + len(block)] = fill_block(decoder, block, how, torch.Generator())
    print(f"=== filled ({int(masked.sum())} tokens, {time.perf_counter() - begin:.1f} s)")
    print(tokenizer.decode(canvas[first:]))
    if args.file is not None:
        equal = int((canvas == tokens[: len(canvas)])[masked].sum())
        print(f"=== original\n{tokenizer.decode(tokens[first : len(canvas)])}")
        print(f"=== {equal} of {int(masked.sum())} masked tokens equal the original")


def main(arguments: list[str]) -> int:
    """Fills and prints, or says what is wrong with the request."""
    try:
        run(parse(arguments))
    except (ValueError, OSError) as error:
        print(f"fill_blocks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
