"""Fills masked positions of one block with a block-diffusion model, in plain transformers.

Owns the semantics of an exported model directory and the forward pass over [clean prefix ; block]
with an explicit mask: slow, and easy to check. Knows nothing of text.
Specified by tests/tools/test_fill_blocks.py.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CHOICES = {"clean_rule": ("token_causal", "block_causal"), "logit_alignment": ("same", "shifted")}


@dataclass(frozen=True)
class Semantics:
    """What the weights were trained for. Units: `block_size` tokens."""

    block_size: int
    mask_token_id: int
    clean_rule: str
    logit_alignment: str


def read_semantics(directory: Path, given: dict[str, Any]) -> Semantics:
    """The values given, else those of config.json, else of bdlm_conversion.json, else the preset.

    The preset is that of the objective which the conversion names, "standard" if it names none.
    Raises: ValueError that lists every missing or unknown value.
    """
    values: dict[str, Any] = {}
    for name in ("bdlm_conversion.json", "config.json"):
        path = directory / name
        values |= json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    values |= given
    next_token = values.get("objective") == "fast_dllm_v2"
    if values.get("clean_rule", "preset") == "preset":
        values["clean_rule"] = CHOICES["clean_rule"][next_token]
    if "logit_alignment" not in values:
        alignment = values.get("alignment", "shifted" if next_token else "same")
        values["logit_alignment"] = "same" if alignment == "same_position" else alignment
    problems = [
        f"{name} is in neither config.json nor the command line; pass --{name.replace('_', '-')}."
        for name in ("block_size", "mask_token_id")
        if not isinstance(values.get(name), int)
    ]
    for name, known in CHOICES.items():
        if values[name] not in known:
            problems.append(f"{name}={values[name]!r} must be one of {', '.join(known)}.")
    if "sliding_attention" in (values.get("layer_types") or []):
        problems.append(
            "layer_types has sliding_attention; only full attention can be filled here."
        )
    if problems:
        raise ValueError(" ".join(problems))
    return Semantics(**{name: values[name] for name in Semantics.__dataclass_fields__})


def allowed_pairs(
    position: torch.Tensor, corrupted: torch.Tensor, rules: Semantics
) -> torch.Tensor:
    """bool [rows, rows]: which rows a row sees; every block is there at most once corrupted.

    A clean key is seen by clean rows at or after it (their whole block under block_causal) and by
    corrupted rows of later blocks; a corrupted key only by the corrupted rows of its own block.
    """
    block = position // rules.block_size
    order = position if rules.clean_rule == "token_causal" else block
    for_clean = order[:, None] >= order[None]
    for_corrupted = block[:, None] > block[None]
    clean_key = torch.where(corrupted[:, None], for_corrupted, for_clean)
    own_block = corrupted[:, None] & (block[:, None] == block[None])
    return torch.where(corrupted[None], own_block, clean_key)


@torch.no_grad()
def block_logits(
    model: Any, clean: torch.Tensor, block: torch.Tensor, rules: Semantics
) -> torch.Tensor:
    """Logits [len(block), V] that predict the tokens of the block which follows `clean`.

    With shifted alignment row i predicts token i+1, so the first token is predicted by the last row
    of the previous block, taken as a corrupted block without masks, as in training. Position 0 has
    no such row; its logits are NaN.
    """
    start, shifted = len(clean), rules.logit_alignment == "shifted"
    first = max(start - rules.block_size, 0) if shifted else start
    tokens = torch.cat([clean, clean[first:], block]).to(model.device)
    position = torch.cat([torch.arange(start), torch.arange(first, start + len(block))])
    corrupted = torch.arange(len(tokens)) >= start
    hidden = ~allowed_pairs(position, corrupted, rules)
    bias = torch.zeros(hidden.shape, dtype=model.dtype)
    bias.masked_fill_(hidden, torch.finfo(model.dtype).min)
    output = model(
        input_ids=tokens[None],
        position_ids=position[None].to(model.device),
        attention_mask=bias[None, None].to(model.device),
        use_cache=False,
        logits_to_keep=len(block) + (1 if shifted and start else 0),
    )
    logits = output.logits[0].to("cpu", torch.promote_types(model.dtype, torch.float32))
    if not shifted:
        return logits
    missing = logits.new_full((0 if start else 1, logits.shape[1]), float("nan"))
    return torch.cat([missing, logits[:-1]])


def fill_block(
    model: Any, clean: torch.Tensor, block: torch.Tensor, rules: Semantics, num_steps: int, ids: int
) -> torch.Tensor:
    """The block with every mask replaced by an id below `ids`, most confident first."""
    block = block.clone()
    excluded = torch.arange(model.config.vocab_size) >= ids
    excluded[rules.mask_token_id] = True
    for step in range(num_steps):
        masked = (block == rules.mask_token_id).nonzero()[:, 0]
        if not len(masked):
            break
        logits = block_logits(model, clean, block, rules)[masked]
        probability, token = logits.masked_fill(excluded, float("-inf")).softmax(-1).max(-1)
        chosen = probability.argsort(descending=True)[: -(-len(masked) // (num_steps - step))]
        block[masked[chosen]] = token[chosen]
    return block
