"""Reads and edits tokenizer files as JSON: which ids are used, and adding a mask token.

Never asks a tokenizer library for an id: those answer the unknown token's id for a string they do
not know. Knows no weights. Specified by tests/convert/test_tokenizer_files.py, which checks the
result with the `tokenizers` library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_MASK_TOKEN = "<|MASK|>"
_ROLES = ("unk_token", "bos_token", "eos_token", "pad_token", "cls_token", "sep_token")
_SPARE_NAME = re.compile(r"mask|reserved|unused|placeholder|extra_id|dummy", re.IGNORECASE)


@dataclass(frozen=True)
class Vocabulary:
    """Every string that a tokenizer knows: `base` from its model, `added` (special ones included).

    `roles` says what an id is used for (unk_token, eos_token, ...). `next_id` is the only id that a
    new added token can get: the tokenizers library counts on from the largest.
    """

    base: Mapping[str, int]
    added: Mapping[str, int]
    roles: Mapping[int, tuple[str, ...]]
    next_id: int

    def find(self, token: str) -> int:
        """Returns the id of that exact string, -1 when the tokenizer does not know it."""
        return self.added.get(token, self.base.get(token, -1))

    def name_of(self, token_id: int) -> str:
        """Returns the string with that id, "" when there is none."""
        for names in (self.added, self.base):
            for name, number in names.items():
                if number == token_id:
                    return name
        return ""


@dataclass(frozen=True)
class MaskRow:
    """The chosen mask token; whether the tokenizer and the tables must grow for it."""

    token: str
    token_id: int
    is_new_token: bool
    is_new_row: bool


def read_vocabulary(directory: Path) -> Vocabulary:
    """Returns the vocabulary of the tokenizer in a Hugging Face directory.

    Raises: ValueError when there is no tokenizer.json.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ValueError(
            f"{directory} has no tokenizer.json, so the mask token cannot be checked; save the "
            f"tokenizer in its fast form (AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [[piece, score], ...]
        vocab = {piece: number for number, (piece, _) in enumerate(vocab)}
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()}
    ids = (*added.values(), len(vocab) - 1)
    plain = Vocabulary(vocab, added, {}, max(ids) + 1)
    return Vocabulary(vocab, added, _read_roles(directory, plain, model), plain.next_id)


def _read_roles(
    directory: Path, vocabulary: Vocabulary, model: Mapping[str, Any]
) -> dict[int, tuple[str, ...]]:
    named: list[tuple[str, Any]] = [("unk_token", model.get("unk_token", model.get("unk_id")))]
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = _read_json(directory / file)
        named += [(role, settings.get(role)) for role in _ROLES]
    for file in ("config.json", "generation_config.json"):
        settings = _read_json(directory / file)
        for role in ("bos_token", "eos_token", "pad_token"):
            ids = settings.get(f"{role}_id")
            named += [(role, number) for number in (ids if isinstance(ids, list) else [ids])]
    roles: dict[int, tuple[str, ...]] = {}
    for role, value in named:
        if isinstance(value, dict):
            value = value.get("content")
        number = vocabulary.find(value) if isinstance(value, str) else value
        if isinstance(number, int) and number >= 0 and role not in roles.get(number, ()):
            roles[number] = (*roles.get(number, ()), role)
    return roles


def choose_mask_row(
    vocabulary: Vocabulary, num_rows: int, *, token: str, token_id: int, resize: bool
) -> MaskRow:
    """Returns the mask row for the user's wish.

    `token` "" and `token_id` -1 mean not given; `num_rows` is the size of the embedding table.
    Raises: ValueError when the id is used, cannot be had, or lies outside the table; the text
    names an id or an option that works.
    """
    if not token and token_id < 0:
        raise ValueError(
            "no mask token given: give --mask-token STRING or --mask-token-id ID; "
            + _advice(vocabulary, num_rows)
        )
    known_id = vocabulary.find(token) if token else -1
    if known_id >= 0:
        if token_id >= 0 and token_id != known_id:
            raise ValueError(
                f"mask_token={token!r} has id {known_id}, not mask_token_id={token_id}; "
                f"give only one of them, or --mask-token-id {known_id}"
            )
        token_id = known_id
    name = vocabulary.name_of(token_id) if token_id >= 0 else ""
    if name:
        _check_spare(vocabulary, num_rows, name, token_id)
        if token and token != name:
            raise ValueError(
                f"mask_token_id={token_id} already is {name!r}, not {token!r}; "
                f"give --mask-token-id {token_id} alone"
            )
        if token_id >= num_rows:
            raise ValueError(
                f"{name!r} has id {token_id}, outside the table of {num_rows} rows; "
                + _advice(vocabulary, num_rows)
            )
        if resize:
            raise ValueError(f"{name!r} has row {token_id} already; leave --resize out")
        return MaskRow(name, token_id, is_new_token=False, is_new_row=False)
    return _new_token(vocabulary, num_rows, token, token_id, resize)


def _check_spare(vocabulary: Vocabulary, num_rows: int, name: str, token_id: int) -> None:
    roles = vocabulary.roles.get(token_id, ())
    if roles:
        use = f"is the tokenizer's {' and '.join(roles)}"
    elif name not in vocabulary.added:
        use = "is an ordinary vocabulary entry"
    elif not _SPARE_NAME.search(name):
        use = "is an added token in use (its name does not say mask, reserved or unused)"
    else:
        return
    raise ValueError(
        f"mask_token_id={token_id} ({name!r}) {use} and cannot become the mask token; "
        + _advice(vocabulary, num_rows)
    )


def _new_token(
    vocabulary: Vocabulary, num_rows: int, token: str, token_id: int, resize: bool
) -> MaskRow:
    new_id = vocabulary.next_id
    if not token:
        token = DEFAULT_MASK_TOKEN
        if vocabulary.find(token) >= 0:
            raise ValueError(f"{token!r} exists already; name another with --mask-token STRING")
    if resize and new_id != num_rows:
        raise ValueError(
            f"--resize adds row {num_rows}, but the tokenizer's next id is {new_id}; "
            + _advice(vocabulary, num_rows, token)
        )
    if new_id >= num_rows and not resize:
        unknown = " and ".join(
            f"id {number} ({', '.join(roles)})"
            for number, roles in vocabulary.roles.items()
            if "unk_token" in roles
        )
        aside = f" (a tokenizer would silently answer {unknown} for it)" if unknown else ""
        raise ValueError(
            f"mask token {token!r} is not in the tokenizer{aside} and its id would be "
            f"{token_id if token_id >= 0 else new_id}, outside the table of {num_rows} rows; "
            + _advice(vocabulary, num_rows, token)
        )
    if token_id >= 0 and token_id != new_id:
        raise ValueError(
            f"mask_token_id={token_id} is unused, but the tokenizer can give a new token only its "
            f"next id {new_id}; " + _advice(vocabulary, num_rows, token)
        )
    return MaskRow(token, new_id, is_new_token=True, is_new_row=resize)


def _advice(vocabulary: Vocabulary, num_rows: int, token: str = "") -> str:
    for name, number in vocabulary.added.items():
        spare = _SPARE_NAME.search(name) and not vocabulary.roles.get(number)
        if spare and number < num_rows:
            return f"--mask-token-id {number} ({name!r}) would work"
    if vocabulary.next_id < num_rows:
        return f"--mask-token-id {vocabulary.next_id} (an unused row of the table) would work"
    if vocabulary.next_id == num_rows:
        name = token or DEFAULT_MASK_TOKEN
        return f"--resize --mask-token '{name}' would work (new id {num_rows})"
    return (
        f"the tokenizer has {vocabulary.next_id} ids and the table {num_rows} rows: "
        f"resize the model to the tokenizer first"
    )


def edit_tokenizer(directory: Path, mask: MaskRow) -> None:
    """Makes `mask` the mask token in the tokenizer files of `directory`, and nothing else."""
    entry = {
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    if mask.is_new_token:
        path = directory / "tokenizer.json"
        tokenizer = _read_json(path)
        tokenizer["added_tokens"] = [
            *(tokenizer.get("added_tokens") or ()),
            {"id": mask.token_id, "content": mask.token, **entry},
        ]
        _write_json(path, tokenizer)
        path = directory / "added_tokens.json"  # the slow tokenizers' list
        if path.is_file():
            _write_json(path, _read_json(path) | {mask.token: mask.token_id})
    path = directory / "tokenizer_config.json"
    settings = _read_json(path)
    decoder = settings.setdefault("added_tokens_decoder", {})
    decoder.setdefault(str(mask.token_id), {"content": mask.token, **entry})
    settings["mask_token"] = mask.token
    _write_json(path, settings)
    path = directory / "special_tokens_map.json"
    if path.is_file():
        _write_json(path, _read_json(path) | {"mask_token": mask.token})


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
