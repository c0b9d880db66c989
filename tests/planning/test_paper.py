"""docs/paper.md is what the generator makes, and keeps its promises."""

from pathlib import Path
from statistics import median

import pytest

from megatron_bp.planning.paper import Line, our_traffic, page, rounded, speedup_lines

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text() -> str:
    return page()


def test_the_page_in_the_repository_is_up_to_date(text: str) -> None:
    assert (ROOT / "docs" / "paper.md").read_text() == text, "run tools/paper_page.py"


def test_traffic_is_exact_and_misses_are_named(text: str) -> None:
    for number in ("210.00 | 210.00", "105.00 | 105.00", "433.13 | 433.13", "28.30 | 28.30"):
        assert number in text
    assert "the full tables" in text.lower()
    assert "| 2.41 | 0.37 |" in text


def test_speedups_are_within_10_percent_in_the_median_and_20_at_worst() -> None:
    errors = [abs(line.error) for line in speedup_lines()]
    assert len(errors) == 11
    assert median(errors) < 0.10
    assert max(errors) < 0.20
    assert all(line.reason for line in speedup_lines() if abs(line.error) > 0.05)


def test_our_design_sends_fewer_bytes() -> None:
    gib = {name: value for name, value, _ in our_traffic()}
    assert gib["Nemotron 14B, keys kept"] == 70.0
    assert gib["the same, keys kept, K = V sent once"] < gib["the same, keys kept"] < 10


def test_halves_are_rounded_away_from_zero() -> None:
    assert [rounded(x, 2) for x in (433.125, 0.005, 2.0)] == ["433.13", "0.01", "2.00"]


def test_a_line_shows_both_numbers_and_the_error() -> None:
    line = Line("it", "256K step s", 50.76, "why")
    assert line.row() == "| it | 56.40 | 50.76 | -10.0 % | why |"
