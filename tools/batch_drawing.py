"""Draws one training sample for show_batch.py; knows where things go on the page, and no data."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle
from PIL import Image

from megatron_bp.data.packing import PADDING
from megatron_bp.layout.visibility import dense_mask

if TYPE_CHECKING:
    from show_batch import Shown

RANKS = ("#4C96CC", "#E9A52B", "#3BAA86", "#CC82AE", "#8C6BB1", "#B5651D", "#7F7F7F", "#BCBD22")
INK, PALE = "#222222", "#8A8A8A"
PROMPT, LEARNT, MASKED, PADDED = "#E4E4E4", "#CFE8D5", "#2B2B2B", "#FFFFFF"
MASK_NOTE = (
    "A coloured point: this row (a token) sees that key; the colour is the rank that owns the key."
    "\n"
    "A masked block sees itself, and the clean blocks before it in its own document.\n"
    "Clean keys travel between ranks; masked ones never leave their rank."
)
TABLE_NOTE = (
    "The model reads every sample twice: clean, and with some tokens masked (black). Whole "
    "documents are packed into a sample;\n"
    "each is cut into blocks. A block draws a noise level t, the chance that a token of its "
    "answers is masked. A rank owns whole\n"
    "blocks of both readings; chunks are dealt so that all ranks have about the same work."
)
MAX_BLOCKS = 28  # lines of the table
MAX_CELL = 9  # characters of a token that fit its cell


def draw(shown: Shown, path: Path) -> str:
    """Writes the picture and returns one line of numbers."""
    if len(shown.plans) > len(RANKS):
        raise ValueError(f"ranks={len(shown.plans)} must be at most {len(RANKS)} to be drawn.")
    blocks = shown.plans[0].blocks
    lines = min(blocks.num_blocks, MAX_BLOCKS)
    width, height = 19.0, max(0.33 * lines + 3.1, 9.8)
    figure = plt.figure(figsize=(width, height), dpi=90, facecolor="white")
    figure.text(0.015, 1 - 0.38 / height, "What a training step sees", fontsize=20, weight="bold")
    figure.text(0.015, 1 - 0.68 / height, f"{shown.title}: {_numbers(shown)}", fontsize=11.5)
    _heads(figure, height)
    tall = 0.33 * (lines + 1.3) / height
    _table(figure.add_axes((0.015, 1 - 1.6 / height - tall, 0.6, tall)), shown, lines)
    below = 1 - 1.85 / height - tall
    figure.text(0.015, below, TABLE_NOTE, fontsize=10.5, linespacing=1.35, va="top")
    side = 5.0
    place = (0.675, 1 - (1.35 + side) / height, side / width, side / height)
    _mask(figure.add_axes(place), shown)
    tall = 0.27 * len(shown.plans) / height
    _balance(figure.add_axes((0.7, 1 - 8.2 / height - tall, 0.2, tall)), shown)
    pixels = io.BytesIO()
    figure.savefig(pixels)
    plt.close(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.open(pixels).convert("RGB").quantize(96, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    return _numbers(shown)


def _numbers(shown: Shown) -> str:
    real = shown.document != PADDING
    pairs = np.array([plan.visibility.num_pairs for plan in shown.plans])
    num_documents = len(np.unique(shown.document[real]))
    return (
        f"{len(real)} tokens, {num_documents} document(s), {(~real).sum()} padding, "
        f"{shown.learnt.sum()} learnt, {shown.masked.any(0).sum()} masked, "
        f"busiest rank {pairs.max() / pairs.mean():.3f} x the mean"
    )


def _heads(figure: Any, height: float) -> None:
    y = 1 - 1.12 / height
    figure.text(0.015, y, "1  The tokens, one block a line", fontsize=14, weight="bold")
    figure.text(0.65, y, "2  The mask: who sees what", fontsize=14, weight="bold")
    figure.text(0.65, 1 - 8.0 / height, "3  Work of each rank", fontsize=14, weight="bold")
    figure.text(0.65, 1 - 7.6 / height, MASK_NOTE, fontsize=10.5, linespacing=1.35)
    _legend(figure, 0.015, 1 - 1.5 / height, height)


def _legend(figure: Any, x: float, y: float, height: float) -> None:
    entries = (
        (PROMPT, "prompt: shown, never learnt", INK),
        (LEARNT, "answer, shown this time", INK),
        (MASKED, "answer, masked: the model must say it", INK),
        (PADDED, "padding", INK),
    )
    for colour, text, ink in entries:
        box = (x, y - 0.03 / height, 0.012, 0.2 / height)
        hatch = "////" if colour == PADDED else ""
        figure.patches.append(
            Rectangle(
                box[:2], box[2], box[3], transform=figure.transFigure, fc=colour, ec=PALE, lw=0.7,
                hatch=hatch,
            )
        )  # fmt: skip
        figure.text(x + 0.0145, y, text, fontsize=9.5, color=ink)
        x += 0.028 + 0.0036 * len(text)


def _table(axes: Any, shown: Shown, lines: int) -> None:
    """A line a block: owner, document, noise level, tokens."""
    blocks = shown.plans[0].blocks
    size = blocks.block_size
    first = 4.9
    axes.set(xlim=(0, first + size), ylim=(lines + 0.2, -1.1))
    axes.axis("off")
    for x, text in ((0.45, "owner"), (1.75, "document"), (3.4, "noise level t"), (first, "tokens")):
        align = "left" if text == "tokens" else "center"
        axes.text(x, -0.35, text, ha=align, fontsize=10, color=INK)
    owner = shown.plans[0].owners.rank_of_block
    for line in range(lines):
        start, stop = int(blocks.start[line]), int(blocks.stop[line])
        rank = int(owner[line])
        axes.add_patch(Rectangle((0.05, line + 0.05), 0.8, 0.9, fc=RANKS[rank], ec="none"))
        axes.text(0.45, line + 0.53, str(rank), ha="center", va="center", fontsize=10)
        document = int(shown.document[start])
        new = line == 0 or document != int(shown.document[start - 1])
        name = "" if document == PADDING else str(document)
        axes.text(1.75, line + 0.53, name, ha="center", va="center", fontsize=10,
                  weight="bold" if new else "normal")  # fmt: skip
        if new and line:
            axes.plot([1.0, first + size], [line, line], color=INK, lw=1.3)
        _noise_bar(axes, 2.5, line, float(shown.t[start]), bool(shown.learnt[start:stop].any()))
        for position in range(start, stop):
            _cell(axes, first + position - start, line, shown, position)
    if lines < blocks.num_blocks:
        axes.text(first, lines + 0.15, f"... and {blocks.num_blocks - lines} blocks more", va="top")


def _noise_bar(axes: Any, x: float, line: int, t: float, is_used: bool) -> None:
    if not is_used:
        axes.text(x + 1.0, line + 0.53, "nothing to learn", ha="center", va="center", fontsize=8,
                  color=PALE)  # fmt: skip
        return
    axes.add_patch(Rectangle((x, line + 0.2), 1.5, 0.6, fc="#F1F1F1", ec="none"))
    axes.add_patch(Rectangle((x, line + 0.2), 1.5 * t, 0.6, fc=PALE, ec="none"))
    axes.text(x + 1.6, line + 0.53, f"{t:.2f}", va="center", fontsize=9)


def _cell(axes: Any, x: float, line: int, shown: Shown, position: int) -> None:
    is_padding = shown.document[position] == PADDING
    is_masked = bool(shown.masked[:, position].any())
    is_learnt = bool(shown.learnt[position])
    colour = PADDED if is_padding else LEARNT if is_learnt else PROMPT
    colour = MASKED if is_masked else colour
    hatch = "////" if is_padding else ""
    axes.add_patch(
        Rectangle((x, line + 0.05), 0.97, 0.9, fc=colour, ec="#D0D0D0", lw=0.5, hatch=hatch)
    )
    if is_padding:
        return
    text = shown.texts[position].replace("\n", "\\n").replace("\t", "\\t").strip(" ")
    text = (text or "_").encode("ascii", "replace").decode().replace("$", r"\$")
    text = text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "~"
    size = 8.5 - 0.45 * max(0, len(text) - 5)
    ink = "white" if is_masked else INK
    axes.text(x + 0.48, line + 0.53, text, ha="center", va="center", fontsize=size, color=ink)


def _mask(axes: Any, shown: Shown) -> None:
    """The mask of all rows in sample order; keys in the colour of their owner."""
    request, blocks = shown.plans[0].request, shown.plans[0].blocks
    length, views = request.length, request.num_views
    image = np.ones(((1 + views) * length, (1 + views) * length, 3))
    colours = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in RANKS])
    owner = colours[shown.plans[0].owners.rank_of_block][blocks.of_position]
    owner = np.tile(owner, (1 + views, 1))
    for plan in shown.plans:
        rows = plan.rows
        mine = rows.stream >= 0
        at = rows.stream[mine] * length + rows.position[mine]
        seen = dense_mask(plan.visibility, np.arange(length), np.arange(views * length))[mine]
        image[at] = np.where(seen[..., None], owner, image[at])
    axes.imshow(image, interpolation="nearest", extent=(0, 1 + views, 1 + views, 0))
    for edge in range(1, 1 + views):
        axes.axhline(edge, color=INK, lw=1)
        axes.axvline(edge, color=INK, lw=1)
    names = ["clean", *["masked" if views == 1 else f"view {v}" for v in range(views)]]
    middle = np.arange(1 + views) + 0.5
    axes.set_xticks(middle, [f"{name} keys" for name in names], fontsize=11)
    axes.set_yticks(middle, [f"{name} rows" for name in names], fontsize=11, rotation=90,
                    va="center")  # fmt: skip
    axes.tick_params(length=0)


def _balance(axes: Any, shown: Shown) -> None:
    """Pairs and tokens of each rank."""
    pairs = np.array([plan.visibility.num_pairs for plan in shown.plans])
    share = 100 * pairs / pairs.sum()
    at = np.arange(len(pairs))[::-1]
    axes.barh(at, share, color=RANKS[: len(pairs)], height=0.75)
    for y, value, count in zip(at, share, pairs, strict=True):
        axes.text(value + 0.5, y, f"{value:.1f} %  ({count:,} pairs)", va="center", fontsize=9.5)
    axes.set_yticks(at, [f"rank {rank}" for rank in range(len(pairs))], fontsize=10)
    axes.set_xlim(0, share.max() * 1.6)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
