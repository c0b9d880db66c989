"""Converts checkpoints between Hugging Face safetensors and Megatron torch_dist.

convert_checkpoint.py hf2mcore HF_DIR OUT            unchanged weights
convert_checkpoint.py ar2bdlm HF_DIR OUT --block-size 32 --mask-token-id 151669
convert_checkpoint.py ar2bdlm GEMMA4_DIR OUT --objective diffusion_gemma
convert_checkpoint.py mcore2hf MEGATRON_DIR OUT --hf-assets OUT/hf [--serve-as sdar]
convert_checkpoint.py mcore2hf BASE_DIR OUT --lora ADAPTER_DIR     merged into the base
convert_checkpoint.py lora2peft ADAPTER_DIR OUT --hf-assets BASE_DIR/hf
convert_checkpoint.py draft2hf MEGATRON_DIR OUT --hf-assets DRAFT_CONFIG_DIR --serve-as dflash2
convert_checkpoint.py inspect DIR  |  verify HF_DIR MEGATRON_DIR        (docs/convert.md)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_bp.convert.ar_to_bdlm import ImportRequest, MaskWish, ar_to_bdlm, hf_to_mcore
from megatron_bp.convert.bdlm_settings import ALIGNMENT_OF_OBJECTIVE, CLEAN_RULES, BdlmSettings
from megatron_bp.convert.check import inspect_directory, verify
from megatron_bp.convert.export import WEIGHTS, ExportRequest, default_assets, mcore_to_hf
from megatron_bp.convert.gemma_to_diffusion import OBJECTIVE, gemma_to_diffusion
from megatron_bp.convert.lora import open_adapters, write_peft
from megatron_bp.convert.megatron_model import LATEST
from megatron_bp.convert.plan import DTYPES, KEEP_DTYPE, Layout
from megatron_bp.convert.progress import ProgressLine
from megatron_bp.convert.serve_as import AS_IT_IS, PROFILES


def check_tokenizer(directory: Path, token: str, token_id: int) -> str:
    """Returns what the `tokenizers` library says of the edit; ValueError when it disagrees."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return "not checked (the tokenizers package is not installed)"
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids = tokenizer.encode(f"a{token}b", add_special_tokens=False).ids
    alone = tokenizer.encode(token, add_special_tokens=False).ids
    back = tokenizer.decode([token_id], skip_special_tokens=False)
    if alone != [token_id] or ids.count(token_id) != 1 or back.strip() != token:
        raise ValueError(
            f"the edited tokenizer encodes {token!r} as {alone}, which must be [{token_id}], and "
            f"decodes [{token_id}] as {back!r}"
        )
    return "encode and decode agree"


def main(argv: list[str]) -> int:
    """Runs one sub-command; returns the exit status."""
    args = make_parser().parse_args(argv)
    progress = ProgressLine(sys.stderr)
    try:
        result = run(args, progress)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        progress.close()
    print(json.dumps(result, indent=2))
    return int(bool(result.get("differ")))


def run(args: argparse.Namespace, progress: ProgressLine) -> dict[str, Any]:
    """Dispatches to the package."""
    if args.command == "inspect":
        return inspect_directory(args.directory)
    if args.command == "verify":
        return verify(args.hf, args.megatron, progress)
    if args.command == "lora2peft":
        return write_peft(open_adapters(args.source), args.hf_assets, args.target)
    common = {"workers": args.workers, "check_finite": args.check_finite}
    if args.command in ("mcore2hf", "draft2hf"):
        paths = (args.source, args.target, args.hf_assets or default_assets(args.source))
        shard = int(args.max_shard_gib * 2**30)
        sizes = (args.iteration, args.dtype, shard, args.block_size, args.mask_token_id)
        request = ExportRequest(
            *(*paths, *sizes, args.overwrite),
            **common,
            objective=args.objective,
            clean_rule=args.clean_rule,
            weights=args.weights,
            serve_as=args.serve_as,
            adapters=tuple(args.lora),
        )
        return mcore_to_hf(request, progress)
    settings = (Layout(args.layout), args.dtype, args.overwrite)
    source = ImportRequest(args.source, args.target, *settings, **common)
    if args.command == "hf2mcore":
        return hf_to_mcore(source, progress)
    wish = MaskWish(args.mask_token, args.mask_token_id, args.resize, args.mask_row_init)
    if args.objective == OBJECTIVE:
        return gemma_to_diffusion(source, args.block_size, wish, progress)
    size = 32 if args.block_size == -1 else args.block_size
    bdlm = BdlmSettings(args.objective, size, args.clean_rule, "", -1)
    return ar_to_bdlm(source, bdlm, wish, progress, check_tokenizer)


def make_parser() -> argparse.ArgumentParser:
    """Returns the command-line parser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("hf2mcore", "ar2bdlm", "mcore2hf", "draft2hf"):
        add = commands.add_parser(name).add_argument
        add("source", type=Path)
        add("target", type=Path)
        add("--dtype", choices=(KEEP_DTYPE, *DTYPES), default=KEEP_DTYPE)
        add("--overwrite", action="store_true")
        add("--workers", type=int, default=1, help="processes; the output is the same")
        add("--check-finite", action="store_true", help="refuse NaN and infinity")
        if name in ("mcore2hf", "draft2hf"):
            add("--hf-assets", type=Path, help="config and tokenizer; default hf/")
            add("--iteration", type=int, default=LATEST, help="default latest")
            add("--max-shard-gib", type=float, default=5.0)
            add("--weights", choices=WEIGHTS, default="auto", help="auto: masters for float32")
            add("--block-size", type=int, default=0, help="tokens")
            add("--mask-token-id", type=int, default=-1)
            add("--objective", choices=list(ALIGNMENT_OF_OBJECTIVE), default="")
            add("--clean-rule", choices=CLEAN_RULES, default="")
            drafts = ("dflash", "dflash2")
            kinds = drafts if name == "draft2hf" else (AS_IT_IS, *(set(PROFILES) - set(drafts)))
            add("--serve-as", choices=sorted(kinds), default=AS_IT_IS, required=kinds == drafts)
            add("--lora", type=Path, nargs="*", default=[], help="runs with adapters, to merge")
        else:
            add("--layout", choices=list(Layout), default=Layout.PER_LAYER)
        if name == "ar2bdlm":
            add("--objective", default="standard", help="diffusion_gemma makes one of Gemma 4")
            add("--block-size", type=int, default=-1, help="tokens; 32, or 256 of diffusion_gemma")
            add("--clean-rule", choices=CLEAN_RULES, default="preset")
            add("--mask-token", default="")
            add("--mask-token-id", type=int, default=-1, help="default: the family's usual one")
            add("--resize", action="store_true", help="add a table row")
            add("--mask-row-init", choices=("mean", "keep"), default="mean")
    add = commands.add_parser("lora2peft").add_argument
    add("source", type=Path, help="--save folder of a run with --bdlm-lora-rank")
    add("target", type=Path)
    add("--hf-assets", type=Path, required=True, help="config of the base")
    commands.add_parser("inspect").add_argument("directory", type=Path)
    add = commands.add_parser("verify").add_argument
    add("hf", type=Path)
    add("megatron", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
