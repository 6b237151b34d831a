"""Marks of the assistant's part in templates are trusted, unless they miss it or contain another part."""

from typing import Any

import pytest

from tests.support.engine.chat_templates import MARKED_DROPPING_REASONING
from tests.support.engine.folders import MARKED_TEMPLATE, make_tokenizer
from tests.unit.engine.data.chat.test_families import CALLS, SEVEN, call, example, says, user
from windlass.engine.data.chat.conversation import ChatRenderer, ChatTemplateError, RenderedText
from windlass.engine.data.examples import ChatExample

TWO_TURNS = (user("a"), says("b c"), user("d"), says("e"))
PRINTED = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
LAST = "{{ messages[-1].role + messages[-1].content }}"
CALLED = "{% for c in m.tool_calls or [] %}{{ c.function.name + (c.function.arguments | tojson) }}{% endfor %}"
# Separate blocks for reasoning, content and the end of the turn.
THREE_BLOCKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endgeneration %} "
    "{% generation %}{{ m.content }}{% endgeneration %} {% generation %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def render(template: str, given: ChatExample) -> RenderedText:
    (rendered,) = ChatRenderer(make_tokenizer(template)).render(given)
    return rendered


def learned(template: str, given: ChatExample) -> list[str]:
    rendered = render(template, given)
    return [rendered.text[start:stop] for start, stop in rendered.targets]


@pytest.mark.parametrize(
    ("silent", "expected"),
    [
        ((), ["<think></think>", "b c", "<|im_end|>", "<think></think>", "e", "<|im_end|>"]),
        ((1,), ["<think></think>", "e", "<|im_end|>"]),
        ((3,), ["<think></think>", "b c", "<|im_end|>"]),
    ],
)
def test_blocks_follow_the_weight_of_their_message(silent: tuple[int, ...], expected: list[str]) -> None:
    assert learned(THREE_BLOCKS, example(*TWO_TURNS, silent=silent)) == expected


def test_blocks_between_two_assistant_messages_of_unlike_weight_are_refused() -> None:
    with pytest.raises(ChatTemplateError, match="it is unclear which belong"):
        learned(THREE_BLOCKS, example(user("a"), says("b"), says("c"), silent=(1,)))


def test_a_block_around_messages_of_unlike_weight_is_refused() -> None:
    template = "{{ messages[0].role + messages[0].content }}{% generation %}"
    template += "{% for m in messages[1:] %}{{ m.role + m.content }}{% endfor %}{% endgeneration %}"
    with pytest.raises(ChatTemplateError, match="it is unclear which belong"):
        learned(template, example(user("a"), says("b"), says("c"), silent=(1,)))


@pytest.mark.parametrize(
    ("template", "field", "complaint"),
    [
        (
            PRINTED + "{% generation %}{% endgeneration %}",
            "messages[1].content",
            r"marks do not cover messages\[1\].content",
        ),
        (
            MARKED_TEMPLATE.replace("m.role == 'assistant'", "loop.last"),
            "messages[1].content",
            r"marks do not cover messages\[1\].content",
        ),
        (MARKED_TEMPLATE.replace("m.role == 'assistant'", "true"), "messages[0].content", "a part of a user message"),
        ("{% generation %}" + LAST + "{% endgeneration %}", "messages[0].content", "drops it"),
    ],
)
def test_marks_that_miss_a_message_or_hold_anothers_are_refused(template: str, field: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint) as caught:
        learned(template, example(*TWO_TURNS))
    assert caught.value.field == field


def test_marks_around_nothing_are_refused() -> None:
    template = PRINTED + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    with pytest.raises(ChatTemplateError, match="cover nothing"):
        learned(template, example(user("a"), says("")))


def test_a_tool_call_outside_of_the_marks_is_refused() -> None:
    template = MARKED_TEMPLATE.replace(
        "{% endgeneration %}",
        "{% endgeneration %}" + CALLED,
    ).replace("m.content }}", "m.content or '' }}")
    with pytest.raises(
        ChatTemplateError, match=r"marks do not cover messages\[1\].tool_calls\[0\].function.name"
    ) as caught:
        learned(template, example(user("q"), CALLS, SEVEN, says("seven")))
    assert caught.value.field == "messages[1].tool_calls[0].function.name"
    inside = template.replace("<|im_end|>{% endgeneration %}", "").replace(
        "{% else", "<|im_end|>{% endgeneration %}{% else"
    )
    parts = learned(inside, example(user("q"), CALLS, SEVEN, says("seven")))
    assert parts == ['f{"x": 1}<|im_end|>', "seven<|im_end|>"]


def reasons(content: str, reasoning: str) -> dict[str, Any]:
    return says(content, reasoning_content=reasoning)


def test_earlier_reasoning_that_a_marked_template_drops_is_told_of_and_the_conversation_stays_one_example() -> None:
    rendered = render(MARKED_DROPPING_REASONING, example(user("a"), reasons("b", "r1"), user("d"), reasons("e", "r2")))
    parts = [rendered.text[start:stop] for start, stop in rendered.targets]
    assert parts == ["b<|im_end|>", "<think>r2</think>e<|im_end|>"]
    assert [note for note in rendered.notes if "without their reasoning" in note] == list(rendered.notes) != []


def test_reasoning_that_a_marked_template_never_shows_is_refused() -> None:
    with pytest.raises(ChatTemplateError, match="drops it") as caught:
        learned(MARKED_TEMPLATE, example(user("a"), reasons("b", "r1")))
    assert caught.value.field == "messages[1].reasoning_content"


def test_parallel_calls_are_marked_each() -> None:
    calls = says(None, tool_calls=[call("f", {"x": 1}), call("g", {})])
    template = MARKED_TEMPLATE.replace(
        "m.content }}<|im_end|>{% end",
        "m.content or '' }}" + CALLED + "<|im_end|>{% end",
    )
    assert learned(template, example(user("q"), calls)) == ['f{"x": 1}g{}<|im_end|>']
