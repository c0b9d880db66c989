#!/usr/bin/env python3
"""Turns text, chats, prompts with completions, or ids into Megatron's indexed dataset.

Writes PREFIX.{bin,idx}, and PREFIX_mask.{bin,idx} that says which tokens are learnt (all of them
for --format text, which needs none). One document per text file, JSON line or table row, in input
order, the same for any number of workers. A killed run goes on where it was. Examples:
    preprocess.py data/python /usr/lib/python3.12 --workers 2 \\
        --glob '*.py' --exclude '*/site-packages/*' --tokenizer smollm2_hf
    preprocess.py data/chat chats.jsonl --format chat --tokenizer smollm2_hf \\
        --max-length 2048 --overflow truncate --workers 2
Records (JSON lines, Parquet, or a directory of Hugging Face's save_to_disk; tables need pyarrow):
    chat    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}
    prompt  {"prompt": "...", "completion": "..."}
    ids     {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}
The work is done by megatron_bp/data and megatron_bp/mcore/indexed.py. Specified by
tests/tools/test_preprocess.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_bp.data.encoding import Encoding, Overflow
from megatron_bp.data.rendering import (
    AssistantMask,
    Format,
    find_assistant_mask,
    load_chat_tokenizer,
)
from megatron_bp.data.sources import find_files
from megatron_bp.data.tokenizer import LoadedTokenizer, load_tokenizer
from megatron_bp.data.work import Progress
from megatron_bp.mcore.indexed import PIECE_BYTES, Job, Summary, existing_files, write_dataset

ADDS_END = (Format.TEXT, Format.PROMPT)  # a chat template writes its own end, ids are complete


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("prefix", type=Path, help="writes PREFIX.bin and PREFIX.idx (pass PREFIX as --data-path)")
    add("inputs", type=Path, nargs="+", help="files or directories")
    add("--tokenizer", type=Path, required=True, help="Hugging Face tokenizer or model directory")
    add("--format", type=Format, choices=list(Format), default=Format.TEXT, help="see above")
    add("--glob", default="", help="files of directories (default *.txt; *.jsonl for records)")
    add("--exclude", action="append", default=[], help="pattern of whole paths to leave out")
    add("--json-key", default="text", help="key of the text for --format text (default text)")
    add("--no-eos", action="store_true", help="do not append the end token to text and completions")
    add("--eos-token", default="", help="token that ends a document (default: the tokenizer's eos)")
    add("--mask-token", default="", help="leave out documents that hold this token; print its id")
    add(
        "--parse-special", action="store_true", help="read '<|eos|>' and the like as special tokens"
    )
    add("--drop-lossy", action="store_true", help="drop documents that do not decode to themselves")
    add(
        "--max-length", type=int, default=0, help="tokens a document may have (default: any number)"
    )
    add(
        "--overflow",
        type=Overflow,
        choices=list(Overflow),
        default=Overflow.REJECT,
        help="what becomes of longer ones (default reject: they are left out, and counted)",
    )
    add(
        "--on-error",
        choices=("skip", "stop"),
        default="stop",
        help="at a malformed record: count and name it, or stop (default)",
    )
    add("--workers", type=int, default=1, help="processes (default %(default)s)")
    add("--min-tokens", type=int, default=1, help="fail below this many, e.g. the sequence length")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    add("--piece-bytes", type=int, default=PIECE_BYTES, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    args.glob = args.glob or ("*.txt" if args.format is Format.TEXT else "*.jsonl")
    return args


def make_encoding(args: argparse.Namespace, tokenizer: LoadedTokenizer) -> Encoding:
    """How the records are encoded. Raises: ValueError for options that do not fit the tokenizer."""
    adds_end = args.format in ADDS_END and not args.no_eos
    if adds_end and tokenizer.eos_id < 0:
        raise ValueError("the tokenizer names no eos token; pass --eos-token TOKEN or --no-eos.")
    if args.max_length < 0 or args.piece_bytes < 1:
        raise ValueError(f"max_length={args.max_length} must be 0 (any) or positive.")
    found = AssistantMask.MARKS
    if args.format is Format.CHAT:
        found = find_assistant_mask(load_chat_tokenizer(args.tokenizer), str(args.tokenizer))
        print(f"assistant tokens: {found}", file=sys.stderr)
    if tokenizer.mask_id >= 0:
        print(f"--mask-token-id {tokenizer.mask_id}", file=sys.stderr)
    return Encoding(
        format=args.format,
        tokenizer_file="",
        tokenizer_folder=tokenizer.folder,
        num_ids=tokenizer.num_ids,
        eos_id=tokenizer.eos_id if adds_end else -1,
        mask_id=tokenizer.mask_id,
        json_key=args.json_key,
        parse_special=args.parse_special,
        drop_lossy=args.drop_lossy,
        assistant_mask=found,
        max_length=args.max_length,
        overflow=args.overflow,
        stop_on_error=args.on_error == "stop",
    )


def make_reporter() -> Callable[[Progress, int], None]:
    """A function that shows progress and rate on stderr, at most every two seconds."""
    begin = time.perf_counter()
    last = [begin]

    def report(done: Progress, weight: int) -> None:
        now = time.perf_counter()
        if done.num_reused and not done.weight:
            print(f"  going on: {done.num_reused} pieces are finished", file=sys.stderr)
        if now - last[0] < 2:
            return
        last[0] = now
        share = done.weight / max(weight, 1)
        print(
            f"  [{'#' * int(20 * share):<20}] {100 * share:3.0f} % of {weight / 1e6:.1f} MB, "
            f"{done.num_documents} documents, {done.num_tokens / 1e6:.2f} M tokens, "
            f"{done.num_tokens / (now - begin) / 1e3:.0f} k tokens/s",
            file=sys.stderr,
            flush=True,
        )

    return report


def describe(summary: Summary, prefix: Path, seconds: float) -> str:
    """The closing report: totals, length histogram, what was dropped, changed and malformed."""
    documents, tokens = len(summary.lengths), summary.num_tokens
    size = sum(path.stat().st_size for path in existing_files(prefix))
    lines = [
        f"{prefix}: {documents} documents, {tokens} tokens, {size / 1e6:.1f} MB on disk",
        f"  {summary.num_learnt} tokens are learnt ({100 * summary.num_learnt / tokens:.1f} %); "
        f"longest document {max(summary.lengths)} tokens",
        f"  {summary.num_bytes / tokens:.2f} bytes of text per token, "
        f"{tokens / max(seconds, 1e-9) / 1e3:.0f} k tokens/s, {seconds:.1f} s",
        "  document lengths (tokens):",
    ]
    tallest = max(count for _, _, count in summary.histogram())
    for lo, hi, count in summary.histogram():
        lines.append(f"  {lo:>9} .. {hi - 1:<9} {count:>8} {'#' * (40 * count // tallest)}")
    lines += [f"  dropped {count}: {what}" for what, count in sorted(summary.dropped.items())]
    lines += [f"  {count} {what}" for what, count in sorted(summary.changed.items()) if count]
    lines += [f"  malformed: {where}" for where in summary.malformed]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Writes one dataset and prints what it holds."""
    args, begin = parse(arguments), time.perf_counter()
    try:
        if args.workers < 1:
            raise ValueError(f"workers={args.workers} must be at least 1, for example 2.")
        files = find_files(args.inputs, args.glob, args.exclude)
        tokenizer = load_tokenizer(args.tokenizer, args.eos_token, args.mask_token)
        job = Job(
            prefix=args.prefix,
            files=tuple(files),
            tokenizer=tokenizer,
            encoding=make_encoding(args, tokenizer),
            num_workers=args.workers,
            min_tokens=args.min_tokens,
            overwrite=args.overwrite,
            piece_bytes=args.piece_bytes,
        )
        total = sum(path.stat().st_size for path in files)
        print(f"{len(files)} files, {total / 1e6:.1f} MB", file=sys.stderr, flush=True)
        summary = write_dataset(job, make_reporter())
    except (ValueError, OSError, ImportError) as error:
        print(f"preprocess: {error}", file=sys.stderr)
        return 1
    print(describe(summary, args.prefix, time.perf_counter() - begin))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
