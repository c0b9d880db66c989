"""Loads a tokenizer from a Hugging Face directory and checks the tokens that data needs of it.

Specified by tests/tools/test_preprocess.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LoadedTokenizer:
    """A tokenizer as its tokenizer.json, the number of its ids, and two ids (-1: none).

    `eos_id` ends a document, `mask_id` stands for a masked token.
    """

    folder: str
    serialized: str
    num_ids: int
    eos_id: int
    mask_id: int


def load_tokenizer(directory: Path, eos_token: str, mask_token: str) -> LoadedTokenizer:
    """The tokenizer of a directory; `eos_token` "" takes the directory's own, `mask_token` "" none.

    Raises: ValueError when the directory does not load, is slow only, or lacks a token.
    """
    from transformers import AutoTokenizer

    if not directory.is_dir():
        raise ValueError(f"tokenizer={directory} is not a directory; give a model directory.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        serialized = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # the library raises many types for the same mistake
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"tokenizer={directory} does not load as a fast tokenizer "
            f"({type(error).__name__}: {first_line}); it needs tokenizer.json and "
            "tokenizer_config.json, for example as tools/extract_smollm2.py writes them."
        ) from error
    vocabulary = tokenizer.get_vocab()
    eos_id = vocabulary.get(eos_token or tokenizer.eos_token or "", -1)
    if eos_token and eos_id < 0:
        raise ValueError(f"eos_token={eos_token!r} is not in the vocabulary of {directory}.")
    mask_id = _single_id(tokenizer, vocabulary, mask_token) if mask_token else -1
    return LoadedTokenizer(
        str(directory), serialized, max(vocabulary.values()) + 1, eos_id, mask_id
    )


def _single_id(tokenizer: Any, vocabulary: dict[str, int], token: str) -> int:
    """The id of a token that is one id however it is asked for.

    A tokenizer answers with its unknown token for what it does not know, which would train
    silently; so the vocabulary is asked.
    """
    pieces = tokenizer.encode(token, add_special_tokens=False)
    if token not in vocabulary or pieces != [vocabulary[token]]:
        raise ValueError(
            f"mask_token={token!r} is not a single id of this tokenizer, which reads it as "
            f"{tokenizer.convert_ids_to_tokens(pieces)}; use a token that it has, or add one with "
            f"tools/convert_checkpoint.py ar2bdlm --resize --mask-token {token!r} and give the "
            "tokenizer that this writes."
        )
    return vocabulary[token]
