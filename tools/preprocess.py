#!/usr/bin/env python3
"""Tokenises text files, directories or JSON lines into Megatron's indexed dataset PREFIX.{bin,idx}.

One document per file or line, in input order, the same for any number of workers. Example:
    preprocess.py data/python /usr/lib/python3.12 --workers 2 \\
        --glob '*.py' --exclude '*/site-packages/*' --tokenizer smollm2_hf
The work is done by megatron_bp/mcore/data_prep.py. Specified by tests/tools/test_preprocess.py.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_bp.mcore.data_prep import (
    Job,
    Summary,
    existing_files,
    find_files,
    load_tokenizer,
    write_dataset,
)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("prefix", type=Path, help="writes PREFIX.bin and PREFIX.idx (pass PREFIX as --data-path)")
    add("inputs", type=Path, nargs="+", help="text files, .jsonl files, or directories")
    add("--tokenizer", type=Path, required=True, help="Hugging Face tokenizer or model directory")
    add("--glob", default="*.txt", help="files to take from directories (default %(default)s)")
    add("--exclude", action="append", default=[], help="pattern of whole paths to leave out")
    add("--json-key", default="text", help="key of the text in JSON lines (default %(default)s)")
    add("--no-eos", action="store_true", help="do not append the end-of-document token")
    add("--eos-token", default="", help="token that ends a document (default: the tokenizer's eos)")
    add(
        "--parse-special", action="store_true", help="read '<|eos|>' and the like as special tokens"
    )
    add("--drop-lossy", action="store_true", help="drop documents that do not decode to themselves")
    add("--workers", type=int, default=1, help="processes (default %(default)s)")
    add("--min-tokens", type=int, default=1, help="fail below this many, e.g. the sequence length")
    add("--overwrite", action="store_true", help="replace an existing dataset")
    return parser.parse_args(arguments)


def make_reporter(total_bytes: int) -> Callable[[int, int, int], None]:
    """A function that prints progress and rate to stderr, at most every two seconds."""
    begin = time.perf_counter()
    last = [begin]

    def report(num_documents: int, num_tokens: int, num_bytes: int) -> None:
        now = time.perf_counter()
        if now - last[0] < 2:
            return
        last[0] = now
        share = 100 * num_bytes / max(total_bytes, 1)
        rate = num_tokens / (now - begin)
        print(
            f"  {num_documents} documents, {num_tokens / 1e6:.2f} M tokens, {share:.0f} % of "
            f"{total_bytes / 1e6:.1f} MB, {rate / 1e3:.0f} k tokens/s",
            file=sys.stderr,
            flush=True,
        )

    return report


def describe(summary: Summary, prefix: Path, seconds: float) -> str:
    """The closing report: totals, length histogram, what was dropped and why."""
    documents, tokens = len(summary.lengths), summary.num_tokens
    size = sum(path.stat().st_size for path in existing_files(prefix))
    lines = [
        f"{prefix}: {documents} documents, {tokens} tokens, {size / 1e6:.1f} MB on disk",
        f"  {summary.num_bytes / tokens:.2f} bytes of text per token, "
        f"{tokens / max(seconds, 1e-9) / 1e3:.0f} k tokens/s, {seconds:.1f} s",
        "  document lengths (tokens):",
    ]
    tallest = max(count for _, _, count in summary.histogram())
    for lo, hi, count in summary.histogram():
        lines.append(f"  {lo:>9} .. {hi - 1:<9} {count:>8} {'#' * (40 * count // tallest)}")
    for reason, count in sorted(summary.dropped.items()):
        lines.append(f"  dropped {count}: {reason}")
    if summary.num_lossy:
        lines.append(
            f"  warning: {summary.num_lossy} documents kept whose tokens do not decode to their "
            "text (the tokenizer changes or lacks characters); --drop-lossy leaves them out"
        )
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Writes one dataset and prints what it holds."""
    args, begin = parse(arguments), time.perf_counter()
    try:
        if args.workers < 1:
            raise ValueError(f"workers={args.workers} must be at least 1, for example 2.")
        files = find_files(args.inputs, args.glob, args.exclude)
        job = Job(
            prefix=args.prefix,
            files=tuple(files),
            tokenizer=load_tokenizer(args.tokenizer, args.eos_token),
            append_eos=not args.no_eos,
            json_key=args.json_key,
            parse_special=args.parse_special,
            drop_lossy=args.drop_lossy,
            num_workers=args.workers,
            min_tokens=args.min_tokens,
            overwrite=args.overwrite,
        )
        total = sum(path.stat().st_size for path in files)
        print(f"{len(files)} files, {total / 1e6:.1f} MB", file=sys.stderr, flush=True)
        summary = write_dataset(job, make_reporter(total))
    except (ValueError, OSError, ImportError) as error:
        print(f"preprocess: {error}", file=sys.stderr)
        return 1
    print(describe(summary, args.prefix, time.perf_counter() - begin))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
