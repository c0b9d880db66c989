"""What tools/draw_ownership.py draws; how it looks is for eyes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
pytest.importorskip("matplotlib", reason="draws")
image = pytest.importorskip("PIL.Image", reason="reads the picture")
draw_ownership = importlib.import_module("draw_ownership")


@pytest.mark.parametrize("rank", range(draw_ownership.RANKS))
def test_the_drawn_view_of_a_block_is_the_method(rank: int) -> None:
    """Clean rows see clean blocks before, half of their own; corrupted rows before, and own."""
    plan = draw_ownership.make_plan(draw_ownership.REQUEST, rank)
    size = draw_ownership.BLOCK
    owned = plan.owners.blocks_of(rank).tolist()
    assert owned == [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]
    for block in owned:
        before = [1.0] * block
        clean, own = draw_ownership.seen_parts(plan, 0, block)
        assert clean[: block + 1] == [*before, (size + 1) / (2 * size)]
        assert not any(clean[block + 1 :] + own)
        clean, own = draw_ownership.seen_parts(plan, 1, block)
        assert clean[:block] == before
        assert not any(clean[block:])
        assert [key for key, part in enumerate(own) if part == 1] == [block]
        assert sum(own) == 1


def test_bytes_are_those_of_the_collectives() -> None:
    """A gather sends its rows to 3 of 4 ranks, a reduce-scatter the same; K and V, 2 bytes each."""
    sent = list(draw_ownership.step_mebibytes().values())
    rows = draw_ownership.LENGTH * 3 // 4
    csbp = 2 * rows * (2 * 8 * 128) * 2 / 2**20
    assert sent[:2] == [2 * csbp, csbp]
    assert 0 < sent[2] < csbp / 20
    assert sent[3] == 0


def test_the_picture_is_wide_white_and_small(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ownership.png"
    assert draw_ownership.main([str(path)]) == 0
    assert path.stat().st_size < 200_000
    picture = image.open(path).convert("RGB")
    assert picture.width == 1600
    assert picture.getpixel((0, 0)) == (255, 255, 255)
    colours = {colour for _, colour in picture.getcolors()}
    assert len(colours) > 8


def test_a_wrong_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert draw_ownership.main(["picture.jpg"]) == 1
    assert "usage: draw_ownership.py OUT.png" in capsys.readouterr().err
