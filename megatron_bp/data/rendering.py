"""Turns a record into text segments or ids, and says which of them are to be learnt.

Chat messages go through the tokenizer's own template. Knows no files. Specified by
tests/data/test_rendering.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

ASSISTANT = "assistant"
PROMPT_KEYS = ("prompt", "completion")
PROBE = ({"role": "user", "content": "question"}, {"role": ASSISTANT, "content": "answer"})


class Format(StrEnum):
    """What a record holds."""

    TEXT = "text"  # a text; all of it is learnt
    CHAT = "chat"  # "messages": [{"role": ..., "content": ...}, ...]; assistants' turns are learnt
    PROMPT = "prompt"  # "prompt" and "completion"; the completion is learnt
    IDS = "ids"  # "input_ids", and "loss_mask" (1: learnt) or all


class AssistantMask(StrEnum):
    """How the tokens of the assistant are found."""

    MARKS = "generation marks of the template"
    PREFIXES = "rendering with and without each answer"


@dataclass(frozen=True)
class Segment:
    """Text that is encoded by itself, and whether its tokens are learnt."""

    text: str
    learnt: bool


@dataclass(frozen=True)
class Ids:
    """A record that comes as tokens; `learnt` has one entry a token."""

    tokens: Sequence[int]
    learnt: Sequence[bool]


class UnusableRecordError(ValueError):
    """A record that does not follow its format."""


class ChatTokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rendering uses."""

    eos_token: str | None

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def get_chat_template(self) -> str: ...


def load_chat_tokenizer(directory: Path) -> ChatTokenizer:
    """The tokenizer of a Hugging Face directory, with its chat template."""
    from transformers import AutoTokenizer

    tokenizer: ChatTokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return tokenizer


def find_assistant_mask(tokenizer: ChatTokenizer, where: str) -> AssistantMask:
    """How this template's assistant tokens can be found; tried on a short conversation.

    Raises: ValueError if there is no template, or neither way works.
    """
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        template = ""
    if not template:
        raise ValueError(
            f"tokenizer={where} has no chat template; use a chat tokenizer, or --format prompt."
        )
    if re.search(r"\{%-?\s*generation\s*-?%\}", template):
        return AssistantMask.MARKS
    try:
        answers = [s.text for s in render_by_prefixes(tokenizer, list(PROBE)) if s.learnt]
    except UnusableRecordError as error:
        raise ValueError(
            f"the chat template of {where} gives no assistant mask: it has no generation marks, "
            f"and {error}; add {{% generation %}} marks around the answer in the template."
        ) from error
    if len(answers) != 1 or "answer" not in answers[0] or "question" in answers[0]:
        raise ValueError(
            f"the chat template of {where} gives no assistant mask: it has no generation marks, "
            f"and rendering with and without the answer differs by {answers}; add generation marks."
        )
    return AssistantMask.PREFIXES


def render_by_marks(tokenizer: ChatTokenizer, messages: list[Any]) -> Ids:
    """The tokens of a conversation; learnt is what the template's generation marks enclose."""
    try:
        found = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception as error:  # templates raise what they like
        raise UnusableRecordError(f"the template refuses it ({_first_line(error)})") from error
    return Ids(found["input_ids"], [bool(x) for x in found["assistant_masks"]])


def render_by_prefixes(tokenizer: ChatTokenizer, messages: list[Any]) -> list[Segment]:
    """The segments of a conversation; an answer is what its turn adds to its generation prompt.

    An answer ends with its end token: white space that the template writes behind it is not learnt.
    Raises: UnusableRecordError if the text before an answer is not a prefix of the text with it.
    """
    segments, done = [], ""
    for index, message in enumerate(messages):
        if message.get("role") != ASSISTANT:
            continue
        before = _render(tokenizer, messages[:index], True)
        after = _render(tokenizer, messages[: index + 1], False)
        if not before.startswith(done) or not after.startswith(before):
            raise UnusableRecordError(f"the template changes earlier text at message {index}")
        answer, rest = _cut_after_end(after[len(before) :], tokenizer.eos_token or "")
        segments += [Segment(before[len(done) :], False), Segment(answer, True)]
        done = after[: len(after) - len(rest)]
    whole = _render(tokenizer, messages, False)
    if not whole.startswith(done):
        raise UnusableRecordError("the template changes earlier text at the end")
    segments.append(Segment(whole[len(done) :], False))
    return [segment for segment in segments if segment.text]


def _cut_after_end(answer: str, end: str) -> tuple[str, str]:
    """The answer with its end token, and the white space behind that."""
    head, found, tail = answer.rpartition(end) if end else ("", "", answer)
    return (head + found, tail) if found and not tail.strip() else (answer, "")


def _render(tokenizer: ChatTokenizer, messages: list[Any], add_generation_prompt: bool) -> str:
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # templates raise what they like
        raise UnusableRecordError(f"the template refuses it ({_first_line(error)})") from error
    return str(text)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def read_messages(record: Any) -> list[Any]:
    """The messages of a chat record. Raises: UnusableRecordError."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise UnusableRecordError('no list of messages under key "messages"')
    if not any(message.get("role") == ASSISTANT for message in messages):
        raise UnusableRecordError("no message of the assistant")
    return messages


def read_prompt(record: Any) -> list[Segment]:
    """Prompt and completion of a record. Raises: UnusableRecordError."""
    texts = [record.get(key) for key in PROMPT_KEYS] if isinstance(record, dict) else []
    strings = [text for text in texts if isinstance(text, str)]
    if len(strings) != len(PROMPT_KEYS):
        raise UnusableRecordError('no texts under the keys "prompt" and "completion"')
    return [Segment(text, learnt) for text, learnt in zip(strings, (False, True), strict=True)]


def read_ids(record: Any) -> Ids:
    """Tokens of a record. Raises: UnusableRecordError."""
    tokens = record.get("input_ids") if isinstance(record, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise UnusableRecordError('no list of integers under key "input_ids"')
    learnt = record.get("loss_mask") or [1] * len(tokens)
    if len(learnt) != len(tokens) or not set(learnt) <= {0, 1}:
        raise UnusableRecordError(
            f'"loss_mask" must hold {len(tokens)} zeros and ones, one a token'
        )
    return Ids(tokens, [bool(x) for x in learnt])
