"""Our flags fit into Megatron's parser; the context-parallel axis carries the context group."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import fields

import pytest

from megatron_bp.config import BlockParallelConfig, flag
from megatron_bp.mcore import arguments
from tests.mcore.parsing import parsed, parser
from tests.mcore.runs import MODEL


def test_no_flag_collides_with_one_of_megatron() -> None:
    from megatron.training.arguments import add_megatron_arguments

    stock = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    options = {option for action in stock._actions for option in action.option_strings}
    names = {action.dest for action in stock._actions}
    for knob in fields(BlockParallelConfig):
        assert flag(knob.name) not in options
        assert knob.name not in names


def test_flags_compose_with_another_provider_and_reach_the_config() -> None:
    extra = argparse.ArgumentParser()
    extra.add_argument("--mine", default=3)
    args = arguments.add_block_parallel_arguments(extra).parse_args(
        [
            "--block-size",
            "8",
            "--bdlm-objective",
            "standard",
            "--mask-token-id",
            "5",
            "--no-bp-prune-last-layer",
        ]
    )
    config = arguments.config_from_args(args)
    assert (args.mine, config.block_size, config.mask_token_id) == (3, 8, 5)
    assert not config.bp_prune_last_layer


@pytest.mark.parametrize(
    ("shards", "bp"), [(c, b) for c, b in itertools.product((1, 2, 4), (1, 2, 4, 8)) if not b % c]
)
def test_the_context_axis_has_the_context_group_and_its_clean_shards(shards: int, bp: int) -> None:
    args = parsed(f"--context-parallel-size {shards} --block-parallel-size {bp}", num_ranks=8)
    arguments.prepare(args, arguments.config_from_args(args))
    size = max(shards, bp)
    assert args.context_parallel_size == size
    assert args.bp_clean_shards == shards
    wanted = [shards, size // shards] if size > 1 else None
    assert args.hierarchical_context_parallel_sizes == wanted
    assert args.encoder_seq_length == 48


def test_nothing_is_touched_without_a_diffusion_objective() -> None:
    args = parsed(base=tuple(MODEL))
    before = dict(vars(args))
    config = arguments.config_from_args(args)
    arguments.prepare(args, config)
    arguments.finish(args, config)
    assert vars(args) == before


def test_the_noise_seed_is_the_seed_unless_given() -> None:
    args = parsed()
    arguments.prepare(args, arguments.config_from_args(args))
    assert args.bdlm_noise_seed == args.seed == 7
    args = parsed("--bdlm-noise-seed 3")
    arguments.prepare(args, arguments.config_from_args(args))
    assert args.bdlm_noise_seed == 3


def test_pipeline_stages_exchange_shapes() -> None:
    args = parsed("--pipeline-model-parallel-size 2", num_ranks=2)
    config = arguments.config_from_args(args)
    arguments.finish(args, config)
    assert args.variable_seq_lengths
    assert args.moe_token_dispatcher_type == "alltoall"


def test_the_banner_says_what_each_degree_consumes() -> None:
    args = parsed("--context-parallel-size 2 --block-parallel-size 4", num_ranks=8)
    config = arguments.config_from_args(args)
    arguments.prepare(args, config)
    args.data_parallel_size, args.seq_length = 2, args.encoder_seq_length
    text = arguments.banner(args, config)
    assert "world 8 = TP 1 x PP 1 x context group 4 x DP 2" in text
    assert "hybrid" in text
    assert "2 clean shard(s), each held by 2 rank(s)" in text


def test_help_explains_every_flag() -> None:
    text = "".join(parser().format_help().split())
    for knob in fields(BlockParallelConfig):
        assert "".join(knob.metadata["help"].split()) in text
