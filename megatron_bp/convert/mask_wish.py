"""Which row becomes the mask token's when the user leaves it open, and what is written into it.

Specified by tests/convert/test_mask_wish.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_bp.convert.mask_row import NewRow, TensorSource, mean_row, stored_row
from megatron_bp.convert.tokenizer_files import MaskRow

# (token, id) of published conversions, rows that the base models leave unused: SDAR for Qwen3,
# Fast-dLLM v2 for Qwen2.5, DFlash for Qwen3.5, Nemotron-Labs-Diffusion for Ministral-3. An empty
# token is the one that the tokenizer has at that id.
_USUAL = {
    "qwen2": ("|<MASK>|", 151665),
    "qwen3": ("<|MASK|>", 151669),
    "qwen3_moe": ("<|MASK|>", 151669),
    "qwen3_5": ("", 248070),
    "qwen3_5_moe": ("", 248070),
    "ministral3": ("", 100),
    "nemotron_labs_diffusion": ("", 100),
}
_NORM_RANGE = (0.2, 5.0)
"""A row to be kept must have this part of the mean row norm: outside it, it was never trained."""


@dataclass(frozen=True)
class MaskWish:
    """What the user said about the mask token; "" and -1 mean not given.

    `init` is "mean" (of the other rows) or "keep" (the row that the table has).
    """

    token: str
    token_id: int
    resize: bool
    init: str


def usual_wish(wish: MaskWish, family: str, vocab_size: int) -> MaskWish:
    """Returns the wish, or the family's usual mask token when no token and no id is given.

    Whether that row is free is for `choose_mask_row` to say.
    """
    token, token_id = _USUAL.get(family, ("", -1))
    if wish.token or wish.token_id >= 0 or wish.resize or not 0 <= token_id < vocab_size:
        return wish
    return replace(wish, token=token, token_id=token_id)


def make_rows(
    source: TensorSource, tables: Sequence[str], mask: MaskRow, init: str
) -> dict[str, NewRow]:
    """Returns the mask row's values for every table.

    Raises: ValueError when a row is to be kept that does not exist, or looks untrained.
    """
    if init not in ("mean", "keep"):
        raise ValueError(f"mask row init={init!r} must be 'mean' or 'keep'")
    if init == "mean":
        return {name: mean_row(source, name, mask.token_id) for name in tables}
    if mask.is_new_row:
        raise ValueError("--mask-row-init keep needs an existing row; use mean with --resize")
    rows = {name: stored_row(source, name, mask.token_id) for name in tables}
    for name, row in rows.items():
        low, high = (part * row.mean_row_norm for part in _NORM_RANGE)
        if not low <= row.norm <= high:
            raise ValueError(
                f"--mask-row-init keep: row {mask.token_id} of {name} has norm {row.norm:.3g}, the "
                f"others {row.mean_row_norm:.3g} on average, so it was not trained; use mean"
            )
    return rows
