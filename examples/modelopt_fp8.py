#!/usr/bin/env python3
"""Quantises an exported block-diffusion model to FP8 with nvidia-modelopt, for serving.

    pip install nvidia-modelopt
    modelopt_fp8.py EXPORTED_HF_DIR OUT --text module.py

Calibration sees the tokens that decoding sees: text in which a random part of every block is masked
(under the causal attention of the plain model; only value ranges are taken). The output is
modelopt's own format (hf_quant_config.json, weight scales), which TensorRT-LLM, vLLM and SGLang
read; block_size, mask_token_id, alignment and tokenizer go with it. Runs on the CPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SETTINGS = ("block_size", "mask_token_id", "logit_alignment", "clean_rule")


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="output of convert_checkpoint.py mcore2hf")
    parser.add_argument("target", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="calibration text")
    parser.add_argument("--config", default="FP8_DEFAULT_CFG", help="a name in modelopt's mtq")
    parser.add_argument("--length", type=int, default=512, help="tokens a sample")
    parser.add_argument("--num-samples", type=int, default=8)
    return parser.parse_args(arguments)


def masked_samples(tokens: torch.Tensor, args: argparse.Namespace, config: Any) -> torch.Tensor:
    """Rows of text [samples, length] with a part of every block masked, from few to all tokens."""
    length = args.length // config.block_size * config.block_size
    count = min(args.num_samples, len(tokens) // max(length, 1))
    if count < 1:
        raise ValueError(f"{args.text} has {len(tokens)} tokens; give a text of {args.length}.")
    rows = tokens[: count * length].view(count, -1, config.block_size).clone()
    generator = torch.Generator().manual_seed(0)
    rate = torch.rand(rows.shape[:2] + (1,), generator=generator)
    masked = torch.rand(rows.shape, generator=generator) < rate
    return torch.where(masked, config.mask_token_id, rows).view(count, length)


def calibrate(samples: torch.Tensor) -> Callable[[Any], None]:
    """A loop that shows the model every sample once."""

    def loop(model: Any) -> None:
        for row in samples:
            model(row[None].to(model.device), use_cache=False)

    return loop


def main(arguments: list[str]) -> int:
    """Quantises and exports, or says what is missing."""
    args = parse(arguments)
    if args.target.exists():
        print(f"modelopt_fp8: {args.target} exists; choose another path", file=sys.stderr)
        return 1
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    absent = [name for name in SETTINGS if not hasattr(model.config, name)]
    if absent:
        print(f"modelopt_fp8: config.json of {args.model} lacks {absent}", file=sys.stderr)
        return 1
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = args.text.read_text(encoding="utf-8")
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    try:
        samples = masked_samples(tokens, args, model.config)
    except ValueError as error:
        print(f"modelopt_fp8: {error}", file=sys.stderr)
        return 1
    with torch.no_grad():
        mtq.quantize(model, getattr(mtq, args.config), calibrate(samples))
        export_hf_checkpoint(model, export_dir=args.target)
    for path in args.model.iterdir():
        if "token" in path.name and path.suffix == ".json":
            shutil.copyfile(path, args.target / path.name)
    print(f"{len(samples)} samples of {samples.shape[1]} tokens; wrote {args.target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
