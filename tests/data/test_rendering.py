"""The tokens that are learnt are the assistant's, found by marks or by prefixes, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_bp.data.rendering import (
    AssistantMask,
    Segment,
    UnusableRecordError,
    find_assistant_mask,
    read_ids,
    read_messages,
    read_prompt,
    render_by_marks,
    render_by_prefixes,
)

jinja2 = pytest.importorskip("jinja2", reason="chat templates are jinja")

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>system\nhelp<e>\n"
    "{% endif %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
FORGETFUL = (  # shows only the last turn
    "{% set last = messages[-1] %}<s>{{ last.role }}\n{{ last.content }}<e>\n"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
STRIPPING = (  # writes a thought into the last turn only, as reasoning models do
    "{% for m in messages %}<s>{{ m.role }}\n{% if loop.last %}<t></t>{% endif %}{{ m.content }}"
    "<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
REFUSING = "{{ raise_exception('roles must alternate') }}"


class Tokenizer:
    """Renders with jinja, one token a character."""

    eos_token = "<e>"

    def __init__(self, template: str) -> None:
        self.template = template

    def get_chat_template(self) -> str:
        if not self.template:
            raise ValueError("no template")
        return self.template

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        def raise_exception(text: str) -> None:
            raise jinja2.TemplateError(text)

        environment = jinja2.Environment()
        environment.globals["raise_exception"] = raise_exception
        return environment.from_string(self.template).render(messages=conversation, **options)


def chat(*turns: str) -> list[dict[str, str]]:
    """Alternating turns of user and assistant."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def test_answers_are_learnt_with_their_end_and_nothing_else_is() -> None:
    segments = render_by_prefixes(Tokenizer(CHATML), chat("q1", "a1", "q2", "a2"))
    assert [s.text for s in segments if s.learnt] == ["a1<e>", "a2<e>"]
    whole = Tokenizer(CHATML).apply_chat_template(chat("q1", "a1", "q2", "a2"))
    assert "".join(s.text for s in segments) == whole
    assert segments[0] == Segment("<s>system\nhelp<e>\n<s>user\nq1<e>\n<s>assistant\n", False)
    assert segments[2].text.startswith("\n<s>user"), "the line break after the end is not learnt"


def test_a_conversation_may_end_with_the_user() -> None:
    segments = render_by_prefixes(Tokenizer(CHATML), chat("q1", "a1", "q2"))
    assert [s.text for s in segments if s.learnt] == ["a1<e>"]
    assert segments[-1] == Segment("\n<s>user\nq2<e>\n", False)


def test_an_answer_without_an_end_token_is_kept_whole() -> None:
    tokenizer = Tokenizer(CHATML)
    tokenizer.eos_token = "<other>"
    segments = render_by_prefixes(tokenizer, chat("q", "a"))
    assert [s.text for s in segments if s.learnt] == ["a<e>\n"]


def test_how_answers_are_found_is_decided_by_the_template() -> None:
    assert find_assistant_mask(Tokenizer(CHATML), "x") is AssistantMask.PREFIXES
    marked = "{%- generation -%}{{ m }}{% endgeneration %}"
    assert find_assistant_mask(Tokenizer(marked), "x") is AssistantMask.MARKS


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "tokenizer=here has no chat template"),
        (FORGETFUL, "the template changes earlier text"),
        (STRIPPING, "the template changes earlier text"),
        (REFUSING, "roles must alternate"),
        ("<s>{{ messages | length }}", "differs by|changes earlier text"),
    ],
)
def test_a_template_without_an_assistant_mask_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_assistant_mask(Tokenizer(template), "here")


def test_a_conversation_that_the_template_rewrites_is_unusable() -> None:
    with pytest.raises(UnusableRecordError, match="changes earlier text"):
        render_by_prefixes(Tokenizer(FORGETFUL), chat("q1", "a1", "q2", "a2"))


def test_marks_give_the_mask_of_the_tokenizer() -> None:
    class Marked(Tokenizer):
        def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
            assert options["return_assistant_tokens_mask"]
            return {"input_ids": [5, 6, 7], "assistant_masks": [0, 1, 1]}

    ids = render_by_marks(Marked(""), chat("q", "a"))
    assert (ids.tokens, ids.learnt) == ([5, 6, 7], [False, True, True])


@pytest.mark.parametrize(
    ("read", "record", "message"),
    [
        (read_messages, {"text": "x"}, "no list of messages"),
        (read_messages, {"messages": ["x"]}, "no list of messages"),
        (read_messages, {"messages": chat("q")}, "no message of the assistant"),
        (read_prompt, {"prompt": "x"}, "no texts under the keys"),
        (read_prompt, {"prompt": "x", "completion": 3}, "no texts under the keys"),
        (read_ids, {"input_ids": [1.5]}, "no list of integers"),
        (read_ids, {"input_ids": [True]}, "no list of integers"),
        (read_ids, {"input_ids": [1, 2], "loss_mask": [1]}, "must hold 2 zeros and ones"),
        (read_ids, {"input_ids": [1, 2], "loss_mask": [1, 2]}, "must hold 2 zeros and ones"),
    ],
)
def test_a_record_of_another_format_is_unusable(read: Any, record: Any, message: str) -> None:
    with pytest.raises(UnusableRecordError, match=message):
        read(record)


def test_prompts_are_not_learnt_and_completions_are() -> None:
    segments = read_prompt({"prompt": "p", "completion": "c"})
    assert segments == [Segment("p", False), Segment("c", True)]
    assert read_ids({"input_ids": [1, 2]}).learnt == [True, True]
