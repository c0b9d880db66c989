#!/usr/bin/env python3
"""Draws who owns which block, what travels and how many bytes that is: docs/ownership.png.

Everything shown is read from megatron_bp.layout, so the picture cannot say what the plan does not
do. Needs matplotlib. Specified by tests/tools/test_draw_ownership.py.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Polygon, Rectangle
from PIL import Image

from megatron_bp.layout.cost import LayerShape, mean_step_bytes, pairs
from megatron_bp.layout.plan import PlanRequest, RankPlan, make_plan

RANKS, BLOCKS, BLOCK = 4, 16, 32
COLOURS = ("#4C96CC", "#E9A52B", "#3BAA86", "#CC82AE")  # Okabe-Ito hues of similar lightness
INK, PALE = "#222222", "#8A8A8A"
REQUEST = PlanRequest(BLOCKS * BLOCK, BLOCK, num_ranks=RANKS, num_clean_shards=RANKS)
LENGTH, WINDOW = 65536, 1024  # tokens, of the byte comparison
SHAPE = LayerShape(num_kv_heads=8, head_size=128)
TEXTS = (  # x, y (parts of the figure), size, text
    (0.02, 0.965, 22, "Block parallelism: one training sample on four ranks"),
    (
        0.02,
        0.938,
        14,
        "A block-diffusion model reads every sample twice: clean, and corrupted (some tokens "
        "masked). A corrupted block sees the clean blocks before it, and itself.",
    ),
    (0.02, 0.893, 16, "1  Who owns what: 16 blocks of 32 tokens, in both streams"),
    (0.02, 0.717, 16, "2  What travels: keys and values of the clean stream, nothing else"),
    (0.02, 0.402, 16, "3  Which keys the rows of each rank see"),
    (
        0.02,
        0.382,
        12,
        "Each line is a block of rows; squares are the keys it sees, in their owner's colour.",
    ),
    (0.62, 0.402, 16, "4  Bytes that a rank sends"),
    (
        0.62,
        0.035,
        12,
        f"One attention layer, forward and backward: {RANKS} ranks, {LENGTH:,} tokens,\n"
        f"{SHAPE.num_kv_heads} key/value heads of {SHAPE.head_size}, bf16.",
    ),
)


def seen_parts(plan: RankPlan, stream: int, block: int) -> tuple[list[float], list[float]]:
    """Part of each clean block, and of each corrupted block, that the rows of one block see."""
    rows = (plan.rows.stream == stream) & (plan.rows.block == block)
    seen, key = plan.visibility, np.arange(plan.request.length)
    parts = []
    for lo, hi in ((seen.clean_lo, seen.clean_hi), (seen.own_lo, seen.own_hi)):
        pair = (lo[rows][:, None] <= key) & (key < hi[rows][:, None])
        parts.append(pair.reshape(-1, BLOCKS, BLOCK).mean(axis=(0, 2)).tolist())
    return parts[0], parts[1]


def step_mebibytes() -> dict[str, float]:
    """MiB that a rank sends for one layer and step (one gather, one reduce-scatter), by method."""
    common = {"length": LENGTH, "block_size": BLOCK, "num_ranks": RANKS}
    requests = {
        "context parallel\n(gathers both streams)": PlanRequest(
            **common, num_clean_shards=RANKS, gather_corrupted=True
        ),
        "block parallel, CSBP\n(clean stream only)": PlanRequest(**common, num_clean_shards=RANKS),
        f"CSBP, sliding window\nof {WINDOW:,} tokens": PlanRequest(
            **common, num_clean_shards=RANKS, window=WINDOW
        ),
        "pure BP (clean rows\non every rank)": PlanRequest(**common, num_clean_shards=1),
    }
    return {
        name: mean_step_bytes(request, SHAPE, num_layers=1, num_gathers=1) / 2**20
        for name, request in requests.items()
    }


def panel(figure: Any, box: tuple[float, float, float, float], size: tuple[float, float]) -> Any:
    """Axes without frame; `box` in parts of the figure, `size` in blocks."""
    axes = figure.add_axes(box)
    axes.set(xlim=(0, size[0]), ylim=(0, size[1]))
    axes.axis("off")
    return axes


def draw_cell(axes: Any, x: float, y: float, rank: int, label: str, corrupted: bool) -> None:
    """One block in its owner's colour; corrupted blocks are hatched."""
    hatch = "////" if corrupted else ""
    axes.add_patch(Rectangle((x, y), 1, 1, fc=COLOURS[rank], ec="white", lw=2, hatch=hatch))
    plate = {"boxstyle": "round,pad=0.1", "fc": COLOURS[rank], "ec": "none"}
    axes.text(x + 0.5, y + 0.47, label, ha="center", va="center", fontsize=13, bbox=plate)


def draw_sample(axes: Any, plan: RankPlan) -> None:
    """Panel 1: both streams in position order, coloured by owner."""
    owner = plan.owners.rank_of_block
    for y, name, corrupted in ((1.1, "clean", False), (0.0, "corrupted", True)):
        axes.text(2.3, y + 0.5, name, ha="right", va="center", fontsize=14)
        for block in range(BLOCKS):
            draw_cell(axes, 2.5 + block, y, owner[block], str(block), corrupted)
    for rank in range(RANKS):
        for chunk in plan.owners.corrupted.chunks_of[rank]:
            lo, hi = (edge / BLOCK for edge in plan.owners.corrupted.span(chunk))
            axes.text(2.5 + (lo + hi) / 2, 2.25, f"rank {rank}", ha="center", fontsize=13)
    note = (
        "Dealt from both ends: each rank owns a chunk\n"
        "from the front and its mirror image from the\n"
        "back. Later blocks see more, so this gives all\n"
        f"ranks the same work: {pairs(REQUEST)[0]:,} of the\n"
        f"{sum(pairs(REQUEST)):,} query-key pairs each."
    )
    assert len(set(pairs(REQUEST))) == 1, "the note says that the work is equal"
    axes.text(19.1, 1.05, note, va="center", fontsize=13, linespacing=1.35)


def draw_exchange(axes: Any, plans: list[RankPlan]) -> None:
    """Panel 2: what each rank holds and which part of it travels."""
    chunks = plans[0].owners.clean
    heads = ((2.8, "corrupted"), (7.95, "early clean"), (10.45, "late clean"))
    for x, name in heads:
        axes.text(x + (2 if x < 5 else 1), 4.85, name, ha="center", fontsize=13)
    for rank, plan in enumerate(plans):
        y = 3.55 - 1.12 * rank
        axes.text(2.3, y + 0.5, f"rank {rank}", ha="right", va="center", fontsize=14)
        for index, block in enumerate(plan.owners.blocks_of(rank)):
            draw_cell(axes, 2.8 + index, y, rank, str(block), True)
        for (x, _), chunk in zip(heads[1:], chunks.chunks_of[rank], strict=True):
            lo, hi = (edge // BLOCK for edge in chunks.span(chunk))
            for block in range(lo, hi):
                draw_cell(axes, x + block - lo, y, rank, str(block), False)
    axes.add_patch(Rectangle((2.55, 0.02), 4.5, 4.7, fill=False, ec=INK, lw=2, ls=(0, (4, 3))))
    axes.text(4.8, -0.5, "never leaves its rank", ha="center", fontsize=13, fontweight="bold")
    arrow = {"arrowstyle": "-|>,head_width=0.5,head_length=0.9", "lw": 3, "color": INK}
    for slab, (name, y) in enumerate((("first", 2.95), ("second", 0.6))):
        part = ("early", "late")[slab]
        axes.annotate("", (16.2, y + 0.5), (12.8, y + 0.5), arrowprops=arrow)
        axes.text(14.3, y + 0.75, f"{part} clean K/V", ha="center", fontsize=13)
        axes.text(16.5, y + 1.25, f"{name} gather: then on every rank", fontsize=13)
        held = [block for block in range(BLOCKS) if slab_of(plans[0], block) == slab]
        for index, block in enumerate(held):
            owner = plans[0].owners.rank_of_block[block]
            draw_cell(axes, 16.5 + index, y, owner, str(block), False)
    note = (
        "Gathers run while attention\n"
        "computes on keys already there.\n\n"
        "Backward: gradients of clean\n"
        "K/V return to their owners by\n"
        "reduce-scatter, the same bytes;\n"
        "those of corrupted K/V stay."
    )
    axes.text(24.85, 2.3, note, va="center", fontsize=12.5, linespacing=1.35)


def slab_of(plan: RankPlan, block: int) -> int:
    """0 if the clean block travels in the first gather, 1 if in the second."""
    chunks = plan.owners.clean
    return int(chunks.slab_of_chunk[chunks.chunks_in(block * BLOCK, block * BLOCK + 1)[0]])


def draw_mask(axes: Any, plan: RankPlan) -> None:
    """Panel 3: what each block of one rank sees; the colour is that of the key's owner."""
    owned = plan.owners.blocks_of(plan.rank).tolist()
    owner = plan.owners.rank_of_block
    rows = [(stream, block) for stream in (0, 1) for block in owned]
    for index, (stream, block) in enumerate(rows):
        y = len(rows) - 1 - index
        axes.text(-0.2, y + 0.45, str(block), ha="right", va="center", fontsize=10)
        clean, own = seen_parts(plan, stream, block)
        columns = [(key, owner[key], clean[key], False) for key in range(BLOCKS)]
        columns += [(BLOCKS + 0.6 + i, plan.rank, own[key], True) for i, key in enumerate(owned)]
        for x, rank, part, corrupted in columns:
            box = {"fc": "#F1F1F1", "ec": "white", "lw": 1}
            axes.add_patch(Rectangle((x, y), 1, 1, **box))
            corners = [(x, y + 1), (x, y), (x + 1, y)] + ([(x + 1, y + 1)] if part == 1 else [])
            box |= {"fc": COLOURS[rank], "hatch": "////" if corrupted else ""}
            if part > 0:
                axes.add_patch(Polygon(corners, **box))
    half = len(rows) / 2
    for y, name in ((1.5 * half, "clean"), (0.5 * half, "corrupted")):
        axes.text(-1.7, y, name, ha="center", va="center", fontsize=11, rotation=90)
    axes.plot([-1.2, BLOCKS + 0.6 + len(owned)], [half, half], color=INK, lw=1.2)
    axes.plot([BLOCKS / 2] * 2, [0, len(rows)], color=INK, lw=1.2, ls=(0, (2, 2)))
    axes.text(-2.2, len(rows) + 0.35, f"rank {plan.rank}", fontsize=13, fontweight="bold")
    for x, name in ((4.6, "1st gather"), (12, "2nd gather"), (BLOCKS + 2.6, "corrupted")):
        axes.text(x, len(rows) + 0.35, name, ha="center", fontsize=11)


def draw_bytes(axes: Any) -> None:
    """Panel 4: bytes on the wire by method."""
    sent = step_mebibytes()
    values = list(sent.values())
    places = np.arange(len(sent))[::-1]
    axes.barh(places, values, height=0.55, color=[PALE, INK, INK, INK])
    for place, value in zip(places, values, strict=True):
        label = f"{value:,.0f} MiB" if value else f"0, for {extra_work():.1f} x the attention work"
        axes.text(value + max(values) * 0.015, place, label, va="center", fontsize=13)
    axes.set_yticks(places, list(sent), fontsize=13)
    axes.set_xlim(0, max(values) * 1.25)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)


def extra_work() -> float:
    """Query-key pairs of a rank under pure BP, in those under CSBP."""
    sizes = {"length": LENGTH, "block_size": BLOCK, "num_ranks": RANKS}
    split, whole = (pairs(PlanRequest(**sizes, num_clean_shards=shards)) for shards in (RANKS, 1))
    return max(whole) / max(split)


def draw(path: Path) -> None:
    """Writes the picture: 1600 pixels wide, white background."""
    plans = [make_plan(REQUEST, rank) for rank in range(RANKS)]
    figure = plt.figure(figsize=(16, 11.6), dpi=100, facecolor="white")
    for x, y, size, text in TEXTS:
        weight = "bold" if size > 14 else "normal"
        figure.text(x, y, text, fontsize=size, fontweight=weight, color=INK, linespacing=1.3)
    draw_sample(panel(figure, (0.02, 0.755, 0.96, 0.13), (30, 2.95)), plans[0])
    draw_exchange(panel(figure, (0.02, 0.455, 0.96, 0.255), (30, 5.76)), plans)
    for rank, plan in enumerate(plans):
        box = (0.02 + 0.285 * (rank % 2), 0.197 - 0.19 * (rank // 2), 0.275, 0.165)
        axes = panel(figure, box, (24, 10))
        axes.set(xlim=(-2.3, 21.7), ylim=(-0.3, 9.5))
        draw_mask(axes, plan)
    draw_bytes(figure.add_axes((0.75, 0.115, 0.235, 0.255)))
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = io.BytesIO()
    figure.savefig(pixels)
    plt.close(figure)
    Image.open(pixels).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def main(arguments: list[str]) -> int:
    """Draws to the path given."""
    if len(arguments) != 1 or not arguments[0].endswith(".png"):
        print(f"usage: draw_ownership.py OUT.png (given: {arguments})", file=sys.stderr)
        return 1
    draw(Path(arguments[0]))
    print(f"wrote {arguments[0]}, {Path(arguments[0]).stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
