"""Gemma 4 to DiffusionGemma: the same weights under the names of an encoder and a decoder.

Every tensor is copied under its new name; `layer_scalar` goes to both of its sets, because it is
the one thing that encoder and decoder do not share. New is the self-conditioning block: its
pre-norm is ones, its gate and up projections are normal with the config's initializer_range (as
transformers initialises them), and its down projection is zero, so that a converted decoder does
not depend on a signal that nothing has trained yet. There is no mask token.
Specified by tests/convert/test_gemma_to_diffusion.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_bp.convert.ar_to_bdlm import ImportRequest, write_import
from megatron_bp.convert.bdlm_settings import AUTOREGRESSIVE, settings_fields
from megatron_bp.convert.families import DIFFUSION_GEMMA, GEMMA4
from megatron_bp.convert.families.gemma4 import GemmaShape
from megatron_bp.convert.hf_assets import NESTED, read_config, write_json
from megatron_bp.convert.hf_model import HfModel, open_hf_model
from megatron_bp.convert.link import TensorInfo
from megatron_bp.convert.mask_row import TensorSource
from megatron_bp.convert.mask_wish import MaskWish
from megatron_bp.convert.plan import check_coverage, hf_shapes, make_links
from megatron_bp.convert.progress import Progress

OBJECTIVE = "diffusion_gemma"
CANVAS_LENGTH = 256
"""Tokens: that of the published model."""

# transformers 5.24, models/diffusion_gemma/modular_diffusion_gemma.py: what DiffusionGemma's
# configs do not have of Gemma 4's.
_NO_TEXT_KEYS = (
    "enable_moe_block",
    "attention_k_eq_v",
    "use_double_wide_mlp",
    "num_kv_shared_layers",
    "vocab_size_per_layer_input",
    "hidden_size_per_layer_input",
    "use_cache",
)
_NO_KEYS = ("audio_config", "boa_token_id", "eoa_token_index", "video_token_id", "audio_token_id")
# Its generation config refuses every other of Gemma's keys and has published defaults of its own.
_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "transformers_version")
_SELF_CONDITIONING = "model.decoder.self_conditioning."
_ROWS = 256
"""Rows drawn at once: bounds the memory of drawing."""


@dataclass(frozen=True)
class Fresh:
    """A tensor that the source does not have: `value` everywhere, or normal when `std` > 0.

    Normal values depend on `stream` and position alone, not on how the rows are cut.
    """

    info: TensorInfo
    value: float
    std: float = 0.0
    stream: int = 0

    def fill(self, lo: int, out: torch.Tensor) -> None:
        """Fills `out` with rows from `lo` on."""
        if not self.std:
            out.fill_(self.value)
            return
        for start in range(0, out.shape[0], _ROWS):
            part = out[start : start + _ROWS]
            drawn = _normal_rows(self.stream, lo + start, part.shape[0], math.prod(part.shape[1:]))
            part.copy_(torch.from_numpy(drawn * self.std).view(part.shape))


def _normal_rows(stream: int, lo: int, rows: int, width: int) -> np.ndarray:
    """Returns standard normal values [rows, width] of rows from `lo` on (Box and Muller)."""
    counters = -(-2 * width // 4)  # a counter gives 4 words; two words make a value
    bits = np.random.Philox(key=stream, counter=lo * counters)
    words = bits.random_raw(rows * counters * 4).reshape(rows, -1)[:, : 2 * width]
    unit = ((words >> np.uint64(11)) + 0.5) * 2.0**-53  # in (0, 1)
    first, second = unit[:, :width], unit[:, width:]
    return np.asarray(np.sqrt(-2.0 * np.log(first)) * np.cos(2.0 * np.pi * second))


class DiffusionSource:
    """A Gemma 4 repository seen as one of DiffusionGemma."""

    def __init__(
        self, source: TensorSource, names: Mapping[str, str], fresh: Mapping[str, Fresh]
    ) -> None:
        """`names` maps new names to those of the source."""
        self._source = source
        self._names = dict(names)
        self._fresh = dict(fresh)
        self.tensors = {name: source.tensors[old] for name, old in names.items()}
        self.tensors |= {name: new.info for name, new in fresh.items()}

    def read_rows_into(self, name: str, lo: int, out: torch.Tensor) -> None:
        """Fills `out` with rows from `lo` on."""
        if name in self._fresh:
            self._fresh[name].fill(lo, out)
        else:
            self._source.read_rows_into(self._names[name], lo, out)

    def iter_rows(self, name: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields (first row, rows) blocks in order."""
        if name not in self._fresh:
            yield from self._source.iter_rows(self._names[name])
            return
        info = self._fresh[name].info
        for lo in range(0, info.shape[0], _ROWS):
            rows = torch.empty((min(_ROWS, info.shape[0] - lo), *info.shape[1:]), dtype=info.dtype)
            self._fresh[name].fill(lo, rows)
            yield lo, rows

    def file_name(self, name: str) -> str:
        """Returns the name of the file that holds the tensor, "" for a new one."""
        return "" if name in self._fresh else self._source.file_name(self._names[name])


def gemma_to_diffusion(
    request: ImportRequest, canvas_length: int, wish: MaskWish, progress: Progress
) -> dict[str, Any]:
    """Converts a Gemma 4 model to a DiffusionGemma one; returns the manifest.

    `canvas_length` is in tokens, -1 for the published model's. Raises: ValueError for a wished mask
    token, and listing everything that DiffusionGemma does not have.
    """
    if wish.token or wish.token_id >= 0 or wish.resize:
        raise ValueError(
            "DiffusionGemma starts from random tokens; leave out --mask-token, --mask-token-id and "
            "--resize"
        )
    canvas_length = CANVAS_LENGTH if canvas_length == -1 else canvas_length
    model = open_hf_model(request.source)
    target, source, _ = view_as_diffusion(model, read_config(request.source), canvas_length)
    fields = {
        "family": DIFFUSION_GEMMA.name,
        **settings_fields(AUTOREGRESSIVE),
        "objective": OBJECTIVE,
        "alignment": "same_position",
        "block_size": canvas_length,
        "clean_rule": "token_causal",
        "converted_from": GEMMA4.name,
        "self_conditioning": "pre_norm 1, gate and up normal, down 0",
    }

    def edit(assets: Path) -> dict[str, Any]:
        written = read_config(assets)  # with the dtype that was asked for
        write_json(assets / "config.json", diffusion_config(model, written, canvas_length))
        generation = assets / "generation_config.json"
        if generation.is_file():
            said = json.loads(generation.read_text(encoding="utf-8"))
            write_json(generation, {k: v for k, v in said.items() if k in _GENERATION_KEYS})
        return {"tokenizer": "unchanged (no mask token)"}

    return write_import(request, target, source, AUTOREGRESSIVE, fields, progress, edit)


def view_as_diffusion(
    model: HfModel, config: Mapping[str, Any], canvas_length: int
) -> tuple[HfModel, DiffusionSource, dict[str, Any]]:
    """Returns a Gemma 4 model as a DiffusionGemma one, its tensors and its config.json.

    Raises: ValueError listing everything that DiffusionGemma does not have.
    """
    config = diffusion_config(model, config, canvas_length)
    shape = DIFFUSION_GEMMA.read_shape(config)
    links = make_links(DIFFUSION_GEMMA, shape)
    source = DiffusionSource(model.source, *_tensors(model, config))
    others = DIFFUSION_GEMMA.pass_through
    passed = {n: info for n, info in source.tensors.items() if n.startswith(others)}
    owned = {n: info for n, info in source.tensors.items() if n not in passed}
    check_coverage(str(model.source.files[0].parent), hf_shapes(links), owned)
    target = replace(model, family=DIFFUSION_GEMMA, shape=shape, links=links, passed=passed)
    return target, source, config


def diffusion_config(
    model: HfModel, config: Mapping[str, Any], canvas_length: int
) -> dict[str, Any]:
    """Returns DiffusionGemma's config.json. Raises: ValueError listing what it cannot say."""
    problems = _problems(model, config)
    if canvas_length < 1:
        problems.append(f"canvas length (--block-size) {canvas_length} must be at least 1; 256")
    if problems:
        raise ValueError("no DiffusionGemma can be made of it:\n  " + "\n  ".join(problems))
    text = {k: v for k, v in config[NESTED].items() if k not in _NO_TEXT_KEYS}
    outer = {k: v for k, v in config.items() if k not in _NO_KEYS}
    return {
        **outer,
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": DIFFUSION_GEMMA.model_types[0],
        "canvas_length": canvas_length,
        "tie_word_embeddings": True,
        NESTED: {**text, "model_type": "diffusion_gemma_text"},
    }


def _problems(model: HfModel, config: Mapping[str, Any]) -> list[str]:
    shape = model.shape
    if model.family.name != GEMMA4.name or not isinstance(shape, GemmaShape):
        return [f"family={model.family.name} must be {GEMMA4.name}"]
    if NESTED not in config:
        return [
            f"model_type={config.get('model_type')!r} is a text model alone, but DiffusionGemma "
            f"has a vision tower; give the whole repository (model_type 'gemma4')"
        ]
    problems = []
    if not shape.num_experts:
        problems.append("enable_moe_block=false: every layer of DiffusionGemma has experts")
    if not shape.shared_kv:
        problems.append("attention_k_eq_v=false: its full attention layers have no v_proj")
    if not shape.tied:
        problems.append("the head must be tied to the embedding")
    cap = config[NESTED].get("final_logit_softcapping")
    if not isinstance(cap, int | float) or cap <= 0:
        problems.append(f"final_logit_softcapping={cap!r} must be positive; it always caps")
    kinds = {name.split(".")[1] for name in model.passed}
    audio = sorted(kinds & {"audio_tower", "embed_audio"})
    if audio:
        problems.append(f"{' and '.join(audio)}: it has no audio; remove these tensors")
    if "vision_tower" not in kinds:
        problems.append("there are no model.vision_tower tensors; it has a vision tower")
    return problems


def _tensors(model: HfModel, config: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Fresh]]:
    """Returns new name -> source name, and the tensors that are new."""
    shape = model.shape
    text = shape.layer_prefix.removesuffix("layers.")
    names = {}
    for old in model.source.tensors:
        if old in model.passed:
            names[old.replace("model.", "model.encoder.", 1)] = old
        elif old.startswith(text):
            names["model.decoder." + old.removeprefix(text)] = old
        # What is left is a head that repeats the embedding.
    for layer in range(shape.num_layers):
        scalar = f"layers.{layer}.layer_scalar"
        names[f"model.encoder.language_model.{scalar}"] = text + scalar
    dtype = model.source.tensors[f"{text}embed_tokens.weight"].dtype
    std = float(config[NESTED].get("initializer_range", 0.02))
    hidden, ffn = shape.hidden_size, shape.ffn_size
    fresh = {
        "pre_norm": Fresh(TensorInfo((hidden,), dtype), 1.0),
        "gate_proj": Fresh(TensorInfo((ffn, hidden), dtype), 0.0, std, 1),
        "up_proj": Fresh(TensorInfo((ffn, hidden), dtype), 0.0, std, 2),
        "down_proj": Fresh(TensorInfo((hidden, ffn), dtype), 0.0),
    }
    return names, {f"{_SELF_CONDITIONING}{name}.weight": new for name, new in fresh.items()}
