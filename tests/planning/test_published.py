"""The published layouts give the published traffic to the last digit, and their imbalance."""

from dataclasses import replace
from decimal import Decimal

import pytest

from megatron_bp.layout.memory import peak_memory
from megatron_bp.planning.paper import rounded
from megatron_bp.planning.predict import Schedule, layer_time
from megatron_bp.planning.published import (
    NUMBERS,
    THEIR_CLUSTER,
    Setting,
    diffusion_gemma,
    imbalance_of_baseline,
    nemotron,
    published_gib,
    published_speedup,
    published_step,
    published_utilisation,
    pure_block_parallel,
    qwen,
    slowdown_of_contiguous,
    slowdown_of_pure,
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
    """Within the asked bounds, 10 and 20 %, where a page line gives no reason for more."""
    step = published_step(nemotron("14b", K256), True)
    assert step.seconds == pytest.approx(NUMBERS["256K step s"].value, rel=0.1)
    assert step.exposed < NUMBERS["256K exposed s"].value  # missed, see docs/paper.md
    for setting, key, bound in (
        (nemotron("14b", K256), "nemotron-14b 256K", 0.2),
        (diffusion_gemma(K256), "diffusiongemma 256K", 0.1),
        (qwen(K256), "qwen 256K lowest", 0.1),
        (qwen(K256), "qwen 256K", 0.1),
    ):
        assert published_speedup(setting) == pytest.approx(NUMBERS[key].value, rel=bound)


def test_utilisation_of_the_conversion_is_the_published_one() -> None:
    """Seconds and operations at once: 20.1 and 26.8 %."""
    for block_owned, key in ((False, "qwen CP MFU"), (True, "qwen CSBP MFU")):
        found = published_utilisation(qwen(K256), block_owned)
        assert found == pytest.approx(NUMBERS[key].value, rel=0.03)


def test_pure_block_parallelism_holds_and_computes_the_replicas() -> None:
    """Two ranks: 3 halves of the rows; 20.9 GiB more, and too much at 128K (141 GB cards)."""
    two = replace(nemotron("14b", K256 // 4), context=2, data=8)
    assert slowdown_of_pure(two) == pytest.approx(NUMBERS["pure BP 64K"].value, rel=0.05)
    pure, owned = (
        peak_memory(run).total / 2**30 for run in (pure_block_parallel(two), two.run(True))
    )
    published = NUMBERS["pure BP 64K GiB"].value - NUMBERS["CSBP 64K GiB"].value
    assert pure - owned == pytest.approx(published, rel=0.05)
    far = replace(two, length=K256 // 2)
    assert peak_memory(pure_block_parallel(far)).total / 2**30 > 141


def test_contiguous_blocks_wait_for_the_last_rank() -> None:
    """Attention grows by 7 / 16 at P 8: corrupted pairs of the last rank are 15 / 8 of the mean."""
    setting = nemotron("14b", K256)
    step = published_step(setting, True).seconds
    extra = (slowdown_of_contiguous(setting) - 1) * step
    run = setting.run(True)
    layer = layer_time(run, run.model.layers[0][0], THEIR_CLUSTER, Schedule.BLOCKING)
    attention = 40 * (2 * layer.attention_forward + layer.attention_backward)
    assert extra == pytest.approx(7 / 16 * attention, rel=1e-3)


def test_every_number_says_where_it_was_found() -> None:
    assert all(number.source for number in NUMBERS.values())
