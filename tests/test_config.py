"""Every knob has a unit or meaning, a default and a reason; the list of knobs is frozen."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from megatron_bp.config import BlockParallelConfig, flag, list_problems

FROZEN = {
    "--block-parallel-size": 1,
    "--block-size": 32,
    "--bdlm-objective": "none",
    "--mask-token-id": -1,
    "--clean-rule": "preset",
    "--bdlm-canvas": "preset",
    "--bdlm-noise-range": "preset",
    "--bdlm-ar-loss-weight": -1.0,
    "--bp-attention-strategy": "native",
    "--bp-attention-kernel": "auto",
    "--bp-grad-wire-dtype": "fp32",
    "--bp-recompute-attention": "auto",
    "--bp-clean-kv": "auto",
    "--bp-peak-tflops": 0.0,
    "--bp-hierarchical-gather": 0,
    "--bp-ownership": "dual_end",
    "--bp-windowed-exchange": True,
    "--bp-overlap": True,
    "--bp-loss-chunk-rows": 1024,
    "--bdlm-noise-seed": -1,
    "--bdlm-data": "stream",
    "--document-positions": "restart",
    "--bdlm-length-multiple": 0,
    "--bp-prune-last-layer": True,
    "--bdlm-lora-rank": 0,
    "--bdlm-lora-alpha": 32.0,
}


def test_the_flags_and_their_defaults_are_frozen() -> None:
    """A new knob needs a reason, a unit and a test, and then a line here."""
    assert {flag(knob.name): knob.default for knob in fields(BlockParallelConfig)} == FROZEN


def test_every_knob_says_why_its_default_is_what_it_is() -> None:
    for knob in fields(BlockParallelConfig):
        text = knob.metadata["help"]
        assert "Default" in text or "no default, because" in text, knob.name


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        BlockParallelConfig().block_size = 3  # type: ignore[misc]


def test_the_default_is_stock_megatron() -> None:
    assert not BlockParallelConfig().is_diffusion


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"block_size": 0}, "--block-size 0 must be at least 1; use 32"),
        (
            {"bdlm_objective": "dflash"},
            "--bdlm-objective dflash is unknown; use one of none, standard",
        ),
        ({"bp_peak_tflops": -1.0}, "--bp-peak-tflops -1.0 must be 0 (by device) or positive"),
        ({"bp_clean_kv": "drop"}, "use one of auto, keep, regather"),
        ({"bdlm_data": "chat"}, "--bdlm-data chat is unknown; use one of stream, sft"),
        ({"bdlm_data": "sft"}, "--bdlm-data sft needs a block-diffusion objective"),
        ({"document_positions": "x"}, "--document-positions x is unknown; use one of restart, run"),
        ({"bdlm_length_multiple": -1}, "--bdlm-length-multiple -1 must be 0 (off) or positive"),
        ({"bp_ownership": "zigzag"}, "zigzag is unknown; use one of dual_end, contiguous"),
        (
            {"bp_hierarchical_gather": -2},
            "--bp-hierarchical-gather -2 must be the ranks of a node, 0 (off) or -1",
        ),
        ({"bdlm_lora_rank": -1}, "--bdlm-lora-rank -1 must be 0 or more; use 16"),
        ({"bdlm_lora_alpha": 0.0}, "--bdlm-lora-alpha 0.0 must be positive; use 32"),
        ({"bdlm_lora_rank": 16}, "--bdlm-lora-rank 16 needs a block-diffusion objective"),
        ({"clean_rule": "causal"}, "use one of preset, token_causal, block_causal"),
        ({"bdlm_canvas": "black"}, "use one of preset, all_masked, seed_and_mask, uniform"),
        ({"bdlm_noise_range": "0.3"}, "--bdlm-noise-range 0.3 must be two numbers, lowest and"),
        ({"bdlm_noise_range": "low,high"}, "use for example --bdlm-noise-range 0.3,0.8"),
        ({"bdlm_objective": "standard"}, "--bdlm-objective standard needs --mask-token-id"),
        (
            {"block_parallel_size": 2},
            "--block-parallel-size 2 needs a block-diffusion objective; use --bdlm-objective "
            "standard",
        ),
    ],
)
def test_a_bad_value_is_named_with_one_that_works(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match="with the arguments") as error:
        BlockParallelConfig(**given)
    assert text in str(error.value)


def test_all_problems_are_reported_in_one_error() -> None:
    with pytest.raises(ValueError, match="3 problems with the arguments") as error:
        BlockParallelConfig(block_size=0, bp_loss_chunk_rows=-1, bp_grad_wire_dtype="fp8")
    assert str(error.value).count("\n  - ") == 3


def test_problems_are_listed_one_a_line() -> None:
    assert list_problems(["a", "b"]) == "2 problems with the arguments:\n  - a\n  - b"


def test_only_choices_that_are_given_replace_the_preset() -> None:
    config = BlockParallelConfig()
    assert config.objective_choices() == {"clean_rule": "preset", "canvas": "preset"}
    given = BlockParallelConfig(bdlm_noise_range="0.3, 0.8", bdlm_ar_loss_weight=0.0)
    assert given.objective_choices() == {
        "clean_rule": "preset",
        "canvas": "preset",
        "t_min": 0.3,
        "t_max": 0.8,
        "ar_loss_weight": 0.0,
    }
