"""What an exported model was trained for, from everything that may say so; never a guess.

Specified by tests/convert/test_export_settings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_bp.convert.bdlm_settings import AUTOREGRESSIVE, BdlmSettings


@dataclass(frozen=True)
class ExportWish:
    """What the user said; "", 0 and -1 mean not given."""

    objective: str = ""
    block_size: int = 0
    clean_rule: str = ""
    mask_token_id: int = -1


_UNSET: dict[str, tuple[Any, ...]] = {
    "objective": ("", "none"),
    "block_size": (0,),
    "clean_rule": ("", "preset"),
    "mask_token_id": (-1,),
}


def find_settings(
    wish: ExportWish,
    args: Mapping[str, Any],
    config: Mapping[str, Any],
    manifest: Mapping[str, Any],
) -> BdlmSettings:
    """Returns the settings: those wished, else of the checkpoint's args, else of the assets.

    `config` is the assets' config.json, `manifest` that of the conversion the assets are from.
    Autoregressive when nothing speaks of blocks, or when a model was converted unchanged and never
    trained. Raises: ValueError when the sources disagree, or
    leave open what a block-diffusion model needs.
    """
    trained: dict[str, Any] = {}
    if args.get("bdlm_objective", "none") != "none":
        trained = {**args, "objective": args["bdlm_objective"]}
    if wish == ExportWish() and not trained and manifest.get("objective") == "none":
        return AUTOREGRESSIVE  # converted unchanged: a BDLM's own config.json says it all
    said = {**manifest, **{name: config[name] for name in _UNSET if name in config}}
    problems: list[str] = []
    values: dict[str, Any] = {}
    for name, unset in _UNSET.items():
        given = [source.get(name, unset[0]) for source in (vars(wish), trained, said)]
        wished, used, told = ((value not in unset, value) for value in given)
        if not wished[0] and used[0] and told[0] and used[1] != told[1]:
            flag = name.replace("_", "-")
            problems.append(
                f"the checkpoint was trained with {name}={used[1]}, but the assets' config.json "
                f"or manifest says {told[1]}; give --{flag} {used[1]} or {told[1]}"
            )
        values[name] = next((value for known, value in (wished, used, told) if known), unset[-1])
    if not problems and all(values[name] in unset for name, unset in _UNSET.items()):
        return AUTOREGRESSIVE
    if values["objective"] == "none":
        problems.append("the objective is in neither checkpoint nor assets; give --objective")
    if values["block_size"] == 0:
        problems.append("the block size is in neither checkpoint nor assets; give --block-size")
    if problems:
        raise ValueError("; ".join(problems))
    token = str(manifest.get("mask_token", ""))
    return BdlmSettings(**values, mask_token=token)
