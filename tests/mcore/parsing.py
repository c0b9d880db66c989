"""Parses flags with Megatron's own parser, as a run does, without starting anything."""

from __future__ import annotations

import argparse
import functools

from megatron_bp.mcore.adaptor import add_arguments
from tests.mcore.runs import DIFFUSION, MODEL


@functools.lru_cache(maxsize=1)
def parser() -> argparse.ArgumentParser:
    """Returns Megatron's parser with our flags."""
    from megatron.training.arguments import add_megatron_arguments

    stock = argparse.ArgumentParser(allow_abbrev=False)
    return add_arguments(add_megatron_arguments(stock))


def parsed(text: str = "", num_ranks: int = 1, base: tuple[str, ...] = ()) -> argparse.Namespace:
    """Returns the arguments of a small diffusion job with the flags of `text` added."""
    args = parser().parse_args([*(base or (*MODEL, *DIFFUSION)), *text.split()])
    args.world_size = num_ranks
    return args
