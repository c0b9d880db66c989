"""Denoises masked blocks with a block-diffusion model in plain transformers, left to right.

Owns the semantics of an exported model directory, the forward pass over [cached clean prefix ;
block] with an explicit mask, and the sampler. Knows nothing of text.
Specified by tests/tools/test_fill_blocks.py and test_generate.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Presets whose clean rows see their whole block.
BLOCK_CAUSAL = ("bd3lm", "fast_dllm_v2", "sdar", "llada2")
CHOICES = {"clean_rule": ("token_causal", "block_causal"), "logit_alignment": ("same", "shifted")}


def load(directory: Path, dtype: str, device: str) -> tuple[Any, Any]:
    """The model, ready to predict, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
    )
    return model.to(device).eval(), tokenizer


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
    objective = values.get("objective")
    if values.get("clean_rule", "preset") == "preset":
        values["clean_rule"] = CHOICES["clean_rule"][objective in BLOCK_CAUSAL]
    if "logit_alignment" not in values:
        alignment = values.get("alignment", "shifted" if objective == "fast_dllm_v2" else "same")
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
    position: torch.Tensor, corrupted: torch.Tensor, rules: Semantics, first: int = 0
) -> torch.Tensor:
    """bool [rows - first, rows]: which rows the rows from `first` on see.

    A clean key is seen by clean rows at or after it (their whole block under block_causal) and by
    corrupted rows of later blocks; a corrupted key only by the corrupted rows of its own block.
    Every block is there at most once corrupted.
    """
    block = position // rules.block_size
    order = position if rules.clean_rule == "token_causal" else block
    for_clean = order[first:, None] >= order[None]
    for_corrupted = block[first:, None] > block[None]
    clean_key = torch.where(corrupted[first:, None], for_corrupted, for_clean)
    own_block = corrupted[first:, None] & (block[first:, None] == block[None])
    return torch.where(corrupted[None], own_block, clean_key)


class PrefixDecoder:
    """Predicts the block after a clean prefix; keys and values of the prefix are computed once."""

    def __init__(self, model: Any, rules: Semantics) -> None:
        from transformers import DynamicCache

        self.model, self.rules = model, rules
        self.length = self.num_forwards = 0  # clean tokens in the cache; forward passes so far
        self._cache = DynamicCache(config=model.config)
        # With shifted alignment nothing predicts position 0.
        self._first = torch.full((1, model.config.vocab_size), float("nan"))

    def extend(self, clean: torch.Tensor) -> None:
        """Appends whole blocks to the prefix.

        With shifted alignment row i predicts token i+1, so the next block's first token is
        predicted by the last row of this prefix, taken as a corrupted block without masks, as in
        training; a clean row would see its own block otherwise.
        """
        size = self.rules.block_size
        if len(clean) % size:
            raise ValueError(f"{len(clean)} tokens are not whole blocks of {size}")
        if not len(clean):
            return
        stop = self.length + len(clean)
        position = torch.arange(self.length, stop)
        rows, corrupted = clean, torch.zeros(len(clean), dtype=torch.bool)
        if self.rules.logit_alignment == "shifted":
            rows = torch.cat([rows, clean[-size:]])
            position = torch.cat([position, position[-size:]])
            corrupted = torch.cat([corrupted, torch.ones(size, dtype=torch.bool)])
        self._first = self._forward(rows, position, corrupted, kept=stop)[-1:]
        self.length = stop

    def logits(self, block: torch.Tensor) -> torch.Tensor:
        """Logits [len(block), V] that predict the tokens of the block after the prefix.

        With shifted alignment those of position 0 are NaN.
        """
        position = torch.arange(self.length, self.length + len(block))
        corrupted = torch.ones(len(block), dtype=torch.bool)
        logits = self._forward(block, position, corrupted, kept=self.length)
        if self.rules.logit_alignment == "same":
            return logits
        return torch.cat([self._first.to(logits.dtype), logits[:-1]])

    @torch.no_grad()
    def _forward(
        self, tokens: torch.Tensor, position: torch.Tensor, corrupted: torch.Tensor, kept: int
    ) -> torch.Tensor:
        """Logits of the last block's rows; the cache keeps the first `kept` keys and values."""
        model, past = self.model, self.length
        positions = torch.cat([torch.arange(past), position])
        streams = torch.cat([torch.zeros(past, dtype=torch.bool), corrupted])
        hidden = ~allowed_pairs(positions, streams, self.rules, past)
        bias = torch.zeros(hidden.shape, dtype=model.dtype)
        bias.masked_fill_(hidden, torch.finfo(model.dtype).min)
        output = model(
            input_ids=tokens[None].to(model.device),
            position_ids=position[None].to(model.device),
            attention_mask=bias[None, None].to(model.device),
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=min(len(tokens), self.rules.block_size),
        )
        if past + len(tokens) > kept:
            self._cache.crop(kept - past - len(tokens))  # a negative number: so many fewer
        self.num_forwards += 1
        logits: torch.Tensor = output.logits[0]
        return logits.to("cpu", torch.promote_types(model.dtype, torch.float32))


def block_logits(
    model: Any, clean: torch.Tensor, block: torch.Tensor, rules: Semantics
) -> torch.Tensor:
    """Logits [len(block), V] that predict the tokens of the block which follows `clean`."""
    decoder = PrefixDecoder(model, rules)
    decoder.extend(clean)
    return decoder.logits(block)


@dataclass(frozen=True)
class Sampling:
    """How masks are replaced.

    A block takes at most `num_steps` forward passes; each commits its share of the masks that are
    left, most certain first, and every mask whose token has at least the probability `threshold`
    (above 1: none). Temperature 0 takes the likeliest token. Only ids below `num_ids` are taken,
    and never the mask.
    """

    num_steps: int
    num_ids: int
    threshold: float = 2.0
    temperature: float = 0.0

    def __post_init__(self) -> None:
        problems = []
        if self.num_steps < 1:
            problems.append(f"steps={self.num_steps} must be at least 1, for example 8.")
        if self.threshold <= 0:
            problems.append(f"threshold={self.threshold} must be above 0, for example 0.9.")
        if self.temperature < 0:
            problems.append(f"temperature={self.temperature} must be 0 or more, for example 0.7.")
        if problems:
            raise ValueError(" ".join(problems))


def fill_block(
    decoder: PrefixDecoder, block: torch.Tensor, how: Sampling, random: torch.Generator
) -> torch.Tensor:
    """The block after the decoder's prefix, with every mask replaced."""
    mask_id, block = decoder.rules.mask_token_id, block.clone()
    for step in range(how.num_steps):
        masked = (block == mask_id).nonzero()[:, 0]
        if not len(masked):
            break
        logits = decoder.logits(block)[masked]
        logits[:, how.num_ids :] = float("-inf")
        logits[:, mask_id] = float("-inf")
        token = logits.argmax(-1, keepdim=True)
        if how.temperature:
            token = torch.multinomial((logits / how.temperature).softmax(-1), 1, generator=random)
        certainty = logits.softmax(-1).gather(1, token)[:, 0]
        share = -(-len(masked) // (how.num_steps - step))
        number = max(share, int((certainty >= how.threshold).sum()))
        chosen = certainty.argsort(descending=True)[:number]
        block[masked[chosen]] = token[chosen, 0]
    return block


def generate(
    decoder: PrefixDecoder,
    prompt: torch.Tensor,
    num_new: int,
    how: Sampling,
    stops: Sequence[int],
    random: torch.Generator,
) -> torch.Tensor:
    """The prompt and at most `num_new` tokens, block by block, up to the first of `stops`.

    The block in which the text ends is filled to its end, as in training, and cut.
    """
    size, mask_id = decoder.rules.block_size, decoder.rules.mask_token_id
    if not len(prompt) and decoder.rules.logit_alignment == "shifted":
        raise ValueError("an empty prompt: no row predicts its first token; give at least 1 token.")
    whole = len(prompt) // size * size
    decoder.extend(prompt[:whole])
    tokens, known = prompt, prompt[whole:]
    while len(tokens) < len(prompt) + num_new:
        block = torch.cat([known, known.new_full((size - len(known),), mask_id)])
        block = fill_block(decoder, block, how, random)
        new = block[len(known) :]
        ends = torch.isin(new, torch.tensor(list(stops), dtype=new.dtype)).nonzero()[:, 0]
        if len(ends):
            tokens = torch.cat([tokens, new[: int(ends[0]) + 1]])
            break
        tokens, known = torch.cat([tokens, new]), block[:0]
        if len(tokens) < len(prompt) + num_new:
            decoder.extend(block)
    return tokens[: len(prompt) + num_new]
