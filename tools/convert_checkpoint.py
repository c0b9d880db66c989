"""Converts Llama-type and Qwen3 dense checkpoints between Hugging Face and Megatron torch_dist.

convert_checkpoint.py hf2mcore HF_DIR OUT            unchanged weights
convert_checkpoint.py ar2bdlm HF_DIR OUT --block-size 32 --mask-token-id 151669
convert_checkpoint.py mcore2hf MEGATRON_DIR OUT --hf-assets OUT/hf
convert_checkpoint.py inspect DIR
convert_checkpoint.py verify HF_DIR MEGATRON_DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_bp.convert.ar_to_bdlm import (
    ImportRequest,
    MaskWish,
    ar_to_bdlm,
    hf_to_mcore,
)
from megatron_bp.convert.bdlm_settings import CLEAN_RULES, BdlmSettings
from megatron_bp.convert.check import inspect_directory, verify
from megatron_bp.convert.export import ExportRequest, default_assets, mcore_to_hf
from megatron_bp.convert.megatron_model import LATEST
from megatron_bp.convert.plan import DTYPES, KEEP_DTYPE, Layout


class TqdmProgress:
    """A `Progress` drawn by tqdm: bytes, bytes/s and the time left; plain lines without tqdm."""

    _bar: Any = None

    def start(self, label: str, total_bytes: int) -> None:
        """Begins a new bar."""
        self.close()
        try:
            from tqdm import tqdm
        except ImportError:
            print(f"{label}: {total_bytes / 2**30:.2f} GiB", file=sys.stderr)
            return
        self._bar = tqdm(desc=label, total=total_bytes, unit="B", unit_scale=True)

    def advance(self, num_bytes: int) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.update(num_bytes)

    def close(self) -> None:
        """Ends the bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


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
    progress = TqdmProgress()
    try:
        result = run(args, progress)
    except ValueError as error:
        progress.close()
        print(f"error: {error}", file=sys.stderr)
        return 1
    progress.close()
    print(json.dumps(result, indent=2))
    return 1 if result.get("differ") else 0


def run(args: argparse.Namespace, progress: TqdmProgress) -> dict[str, Any]:
    """Dispatches to the package."""
    if args.command == "inspect":
        return inspect_directory(args.directory)
    if args.command == "verify":
        return verify(args.hf, args.megatron, progress)
    if args.command == "mcore2hf":
        assets = args.hf_assets or default_assets(args.source)
        shard = int(args.max_shard_gib * 2**30)
        sizes = (args.iteration, args.dtype, shard, args.block_size, args.mask_token_id)
        request = ExportRequest(args.source, args.target, assets, *sizes, args.overwrite)
        return mcore_to_hf(request, progress)
    layout = Layout(args.layout)
    source = ImportRequest(args.source, args.target, layout, args.dtype, args.overwrite)
    if args.command == "hf2mcore":
        return hf_to_mcore(source, progress)
    bdlm = BdlmSettings(args.objective, args.block_size, args.clean_rule, "", -1)
    wish = MaskWish(args.mask_token, args.mask_token_id, args.resize, args.mask_row_init)
    manifest = ar_to_bdlm(source, bdlm, wish, progress)
    token, token_id = manifest["mask_token"], manifest["mask_token_id"]
    return manifest | {"tokenizer": check_tokenizer(args.target / "hf", token, token_id)}


def make_parser() -> argparse.ArgumentParser:
    """Returns the command-line parser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("hf2mcore", "ar2bdlm", "mcore2hf"):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
        command.add_argument("--dtype", choices=(KEEP_DTYPE, *DTYPES), default=KEEP_DTYPE)
        command.add_argument("--overwrite", action="store_true")
        if name == "mcore2hf":
            command.add_argument("--hf-assets", type=Path, help="config and tokenizer; default hf/")
            command.add_argument("--iteration", type=int, default=LATEST, help="default latest")
            command.add_argument("--max-shard-gib", type=float, default=5.0)
            command.add_argument("--block-size", type=int, default=0, help="tokens")
            command.add_argument("--mask-token-id", type=int, default=-1)
        else:
            command.add_argument("--layout", choices=list(Layout), default=Layout.PER_LAYER)
        if name == "ar2bdlm":
            command.add_argument("--objective", default="standard")
            command.add_argument("--block-size", type=int, default=32, help="tokens")
            command.add_argument("--clean-rule", choices=CLEAN_RULES, default="preset")
            command.add_argument("--mask-token", default="")
            command.add_argument("--mask-token-id", type=int, default=-1)
            command.add_argument("--resize", action="store_true", help="add a table row")
            command.add_argument("--mask-row-init", choices=("mean", "keep"), default="mean")
    commands.add_parser("inspect").add_argument("directory", type=Path)
    command = commands.add_parser("verify")
    command.add_argument("hf", type=Path)
    command.add_argument("megatron", type=Path)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
