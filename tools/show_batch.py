#!/usr/bin/env python3
"""Draws a real training sample: its tokens, its noise, what is learnt, who owns what, and the mask.

    show_batch.py OUT.png --data-path data/chats --bdlm-data sft --tokenizer smollm2_hf \\
        --seq-length 256 --block-size 16 --mask-token '<|mask|>' --ranks 4 --sample 3
The sample is the one that training reads under the same --seq-length, --seed and --split, with the
same noise; owners and mask are read from the plan. Needs matplotlib. The drawing is in
batch_drawing.py. Specified by tests/tools/test_show_batch.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from numpy.typing import NDArray

from megatron_bp.data.packing import document_spans
from megatron_bp.data.tokenizer import load_tokenizer
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan
from megatron_bp.mcore import dataset, sft
from megatron_bp.objectives.noise import noise_levels
from megatron_bp.objectives.objective import PRESETS, make_objective


@dataclass(frozen=True, eq=False)
class Shown:
    """One sample and its plans, ready to be drawn.

    Shapes: `tokens`, `document`, `t` [L]; `masked`, `target` bool [V, L]; `learnt` bool [L].
    `texts` are the tokens as text, `plans` one a rank.
    """

    title: str
    tokens: NDArray[np.int64]
    texts: list[str]
    document: NDArray[np.int64]
    learnt: NDArray[np.bool_]
    masked: NDArray[np.bool_]
    target: NDArray[np.bool_]
    t: NDArray[np.float64]
    plans: list[RankPlan]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; names and defaults are those of training where both have a flag."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("output", type=Path, help="a .png file")
    add("--data-path", nargs="+", required=True, help="prefixes, as in training")
    add("--bdlm-data", choices=("stream", "sft"), default="stream")
    add("--split", default="98,2,0")
    add("--tokenizer", type=Path, required=True, help="Hugging Face directory, to show tokens")
    add("--mask-token", required=True, help="its mask token, such as '<|mask|>'")
    add("--seq-length", type=int, default=256)
    add("--block-size", type=int, default=16)
    add("--bdlm-objective", choices=sorted(PRESETS), default="standard")
    add("--reset-attention-mask", action="store_true", help="keep documents of a stream apart")
    add("--seed", type=int, default=1234)
    add("--ranks", type=int, default=4, help="ranks that share a sample (default %(default)s)")
    add("--clean-shards", type=int, default=0, help="ranks that hold clean rows (default: all)")
    add("--sample", type=int, default=0, help="index of the training sample (default %(default)s)")
    return parser.parse_args(arguments)


def training_samples(args: argparse.Namespace, eod: int, num_ids: int) -> Any:
    """The training dataset of these flags; at least as many samples as are needed."""
    wanted = [args.sample + 1, 0, 0]
    given = SimpleNamespace(
        **{name: None for name in ("data_args_path", "per_split_data_args_path")},
        **{f"{split}_data_path": None for split in ("train", "valid", "test")},
        data_path=args.data_path,
        mock_data=False,
        seq_length=args.seq_length,
        seed=args.seed,
        split=args.split,
    )
    tokenizer = SimpleNamespace(
        eod=eod, pad=-1, vocab_size=num_ids, unique_identifiers={"name": str(args.tokenizer)}
    )
    if args.bdlm_data == "sft":
        return sft.build_packed_datasets(given, tokenizer, wanted, lambda: True)[0]
    return _stream(given, tokenizer, wanted)


def _stream(given: SimpleNamespace, tokenizer: SimpleNamespace, wanted: list[int]) -> Any:
    """Megatron's own dataset, with its index in a folder that is removed again."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.training.utils import get_blend_and_blend_per_split

    with tempfile.TemporaryDirectory() as cache:
        config = GPTDatasetConfig(
            random_seed=given.seed,
            sequence_length=given.seq_length,
            blend=get_blend_and_blend_per_split(given)[0],
            split=given.split,
            path_to_cache=cache,
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        builder = BlendedMegatronDatasetBuilder(GPTDataset, wanted, lambda: True, config)
        built = builder.build()[0]
        return [built[index] for index in range(wanted[0])]


def load(args: argparse.Namespace) -> Shown:
    """Reads, corrupts and plans the chosen sample. Raises: ValueError for what does not fit."""
    tokenizer = load_tokenizer(args.tokenizer, "", args.mask_token)
    objective = make_objective(args.bdlm_objective)
    rules = dataset.CorruptionRules(
        objective=objective,
        block_size=args.block_size,
        mask_token_id=tokenizer.mask_id,
        noise_seed=args.seed,
        end_of_document=tokenizer.eos_id,
        split_documents=args.bdlm_data == "sft" or args.reset_attention_mask,
        end_is_target=True,
        vocab_size=tokenizer.num_ids,
    )
    if args.sample < 0:
        raise ValueError(f"sample={args.sample} must be 0 or more.")
    clean = training_samples(args, tokenizer.eos_id, tokenizer.num_ids)[args.sample]
    sample = rules.sample(clean, args.sample, is_padding=False)
    document = sample["document"].numpy()
    request = PlanRequest(
        length=args.seq_length,
        block_size=args.block_size,
        num_ranks=args.ranks,
        num_clean_shards=args.clean_shards or args.ranks,
        num_views=objective.num_views,
        clean_rule=objective.clean_rule,
        corrupted_rule=objective.corrupted_rule,
        documents=document_spans(document, args.block_size) if rules.split_documents else (),
    )
    blocks = request.blocks
    levels = noise_levels(blocks, objective, seed=args.seed, sample_index=args.sample)
    weights = sample["weights"].numpy()
    shift = objective.label_shift
    target = np.roll(weights > 0, shift, axis=1) if shift else weights > 0
    tokens = sample["clean"].numpy()
    names = ", ".join(Path(prefix).name for prefix in args.data_path)
    return Shown(
        title=f"sample {args.sample} of {names}, objective {objective.name}",
        tokens=tokens,
        texts=_texts(tokenizer.serialized, tokens),
        document=document,
        learnt=rules.supervised(clean, is_padding=False),
        masked=sample["corrupted"].numpy() != tokens,
        target=target,
        t=levels[blocks.of_position],
        plans=[make_plan(request, rank) for rank in range(args.ranks)],
    )


def _texts(serialized: str, tokens: NDArray[np.int64]) -> list[str]:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(serialized)
    return [backend.decode([token], skip_special_tokens=False) for token in tokens.tolist()]


def main(arguments: list[str]) -> int:
    """Draws to the path given, or says what is wrong with the request."""
    args = parse(arguments)
    try:
        if args.output.suffix != ".png":
            raise ValueError(f"output={args.output} must be a .png file.")
        from batch_drawing import draw

        print(draw(load(args), args.output))
    except (ValueError, OSError, ImportError) as error:
        print(f"show_batch: {error}", file=sys.stderr)
        return 1
    print(f"wrote {args.output}, {args.output.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
