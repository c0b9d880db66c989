"""Rotary settings of a Hugging Face config as Megatron arguments: plain, Llama 3 and YaRN.

Knows both spellings (transformers 4: rope_theta and rope_scaling, 5: rope_parameters). Flag names
are those of megatron-core 0.19.2 (training/arguments.py; argument_utils.py maps the YaRN ones).
Specified by tests/convert/test_rope.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rope:
    """What the rotary embedding needs. `llama3_factor` 0.0 means no Llama 3 scaling.

    `args` and `flags` are those of `ModelShape`; so are `notes`.
    """

    base: int
    llama3_factor: float
    args: tuple[tuple[str, Any], ...] = ()
    flags: tuple[tuple[str, str | int | float | bool], ...] = ()
    notes: tuple[str, ...] = ()


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary entries of either spelling as one mapping, in the new spelling."""
    settings: dict[str, Any] = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in config:
            settings[name] = config[name]
    settings |= dict(config.get("rope_scaling") or {})
    settings |= dict(config.get("rope_parameters") or {})
    settings["rope_type"] = settings.get("rope_type", settings.get("type")) or "default"
    return settings


def read_rope(config: Mapping[str, Any], problems: list[str], *, partial: bool = False) -> Rope:
    """Returns the rotary settings; adds to `problems` what Megatron cannot express.

    `partial` says whether the family may rotate only a part of each head.
    """
    settings = rope_settings(config)
    base = settings.get("rope_theta", 10000.0)
    if not isinstance(base, int | float) or base != int(base):
        problems.append(f"rope_theta={base!r} must be a whole number (--rotary-base is an integer)")
        base = 10000
    args, flags = [], []
    percent = settings.get("partial_rotary_factor", 1.0)
    if percent != 1.0 and not partial:
        problems.append(f"partial_rotary_factor={percent} must be 1.0")
    elif percent != 1.0:
        args.append(("rotary_percent", percent))
        flags.append(("rotary-percent", percent))
    kind = settings["rope_type"]
    if kind == "yarn":
        yarn = _read_yarn(settings, config, problems)
        return Rope(int(base), 0.0, (*args, *yarn.args), (*flags, *yarn.flags), yarn.notes)
    factor = 0.0
    if kind == "llama3":
        factor = _read_llama3(settings, problems)
    elif kind != "default":
        problems.append(
            f"rope_type={kind!r} has no counterpart in Megatron's GPTModel flags; "
            f"'default', 'llama3' and 'yarn' can be converted"
        )
    return Rope(int(base), factor, tuple(args), tuple(flags))


_LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _read_llama3(settings: Mapping[str, Any], problems: list[str]) -> float:
    for name, value in _LLAMA3.items():
        if settings.get(name) != value:
            problems.append(
                f"rope scaling {name}={settings.get(name)!r} differs from {value}, "
                f"which Megatron's --use-rope-scaling has built in"
            )
    return float(settings.get("factor", 0.0))


def _read_yarn(settings: Mapping[str, Any], config: Mapping[str, Any], problems: list[str]) -> Rope:
    factor = settings.get("factor")
    original = settings.get(
        "original_max_position_embeddings", config.get("max_position_embeddings")
    )
    if not isinstance(factor, int | float) or factor < 1 or not isinstance(original, int):
        problems.append(
            f"YaRN needs factor >= 1 and an integer original_max_position_embeddings; the config "
            f"has factor={factor!r}, original_max_position_embeddings={original!r}"
        )
        return Rope(1, 0.0)
    # transformers: both mscale and mscale_all_dim set -> their ratio, else mscale(factor, 1).
    # Megatron: always the ratio; mscale_all_dim 0 makes the divisor 1.
    both = settings.get("mscale") and settings.get("mscale_all_dim")
    mscale = float(settings["mscale"]) if both else 1.0
    all_dim = float(settings["mscale_all_dim"]) if both else 0.0
    implied = _mscale(factor, mscale) / _mscale(factor, all_dim)
    stated = settings.get("attention_factor")
    if stated is not None and not math.isclose(stated, implied, rel_tol=1e-6):
        problems.append(
            f"YaRN attention_factor={stated} differs from {implied:.6g}, which factor and mscale "
            f"imply; Megatron has no flag for it"
        )
    values: dict[str, int | float] = {
        "rotary_scaling_factor": float(factor),
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": float(settings.get("beta_fast") or 32.0),
        "yarn_beta_slow": float(settings.get("beta_slow") or 1.0),
        "mscale": mscale,
        "mscale_all_dim": all_dim,
    }
    rounds = bool(settings.get("truncate", True))
    args: list[tuple[str, Any]] = [("position_embedding_type", "yarn"), *values.items()]
    args.append(("yarn_correction_range_round_to_int", rounds))
    flags: list[tuple[str, str | int | float | bool]] = [("position-embedding-type", "yarn")]
    flags += [(name.replace("_", "-"), value) for name, value in values.items()]
    prefix = "" if rounds else "no-"
    flags.append((f"{prefix}yarn-correction-range-round-to-int", True))
    notes = _llama4_note(settings, original, args)
    return Rope(1, 0.0, tuple(args), tuple(flags), notes)


def _llama4_note(
    settings: Mapping[str, Any], original: int, args: list[tuple[str, Any]]
) -> tuple[str, ...]:
    beta = settings.get("llama_4_scaling_beta")
    if not beta:
        return ()
    args.append(("llama_4_scaling_beta", float(beta)))
    return (
        f"llama_4_scaling_beta={beta}: queries are scaled by "
        f"1 + {beta} * log(1 + floor(position / {original})), which is 1 below position "
        f"{original}; no Megatron flag carries it, so train at most {original} positions or apply "
        f"the scale from logical positions",
    )


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
