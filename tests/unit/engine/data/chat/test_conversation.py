from typing import Any

import pytest

from tests.support.engine.folders import MARKED_TEMPLATE, PLAIN_TEMPLATE, make_tokenizer
from windlass.engine.data.chat.conversation import ChatRenderer, ChatTemplateError
from windlass.engine.data.examples import ChatExample


def conversation(*turns: tuple[str, str], weights: tuple[int, ...] | None = None, **more: Any) -> ChatExample:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    if weights is None:
        weights = tuple(int(role == "assistant") for role, _ in turns)
    return ChatExample(messages=messages, tools=more.get("tools"), weights=weights)


TWO_TURNS = (("system", "s"), ("user", "a"), ("assistant", "b c"), ("user", "d"), ("assistant", "e"))


def learned(template: str, example: ChatExample) -> tuple[str, list[str]]:
    (rendered,) = ChatRenderer(make_tokenizer(template)).render(example)
    return rendered.text, [rendered.text[start:stop] for start, stop in rendered.targets]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_the_assistants_text_and_its_end_of_turn_are_learned(template: str) -> None:
    text, parts = learned(template, conversation(*TWO_TURNS))
    assert parts == ["b c<|im_end|>", "e<|im_end|>"]
    assert text == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb c<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\ne<|im_end|>\n"
    )


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKED_TEMPLATE])
def test_a_message_of_weight_0_is_not_learned(template: str) -> None:
    assert learned(template, conversation(*TWO_TURNS, weights=(0, 0, 0, 0, 1)))[1] == ["e<|im_end|>"]
    assert learned(template, conversation(*TWO_TURNS, weights=(0, 0, 0, 0, 0)))[1] == []


def test_a_turn_that_ends_without_a_special_token_is_learned_to_its_last_character() -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert learned(template, conversation(("user", "a"), ("assistant", "b ")))[1] == ["b \n"]


def test_tools_reach_the_template() -> None:
    template = "{% for t in tools %}{{ t.name }};{% endfor %}" + PLAIN_TEMPLATE
    text, _ = learned(template, conversation(("user", "a"), ("assistant", "b"), tools=({"name": "clock"},)))
    assert text.startswith("clock;<|im_start|>user")


def test_turns_that_a_template_rewrites_later_are_examples_with_the_prompt_of_their_time() -> None:
    template = "{{ messages | length }}" + PLAIN_TEMPLATE
    first, second = ChatRenderer(make_tokenizer(template)).render(conversation(*TWO_TURNS))
    # The model is prompted with a conversation of two messages, then of four.
    assert [item.text[start:stop] for item in (first, second) for start, stop in item.targets] == [
        "b c<|im_end|>",
        "e<|im_end|>",
    ]
    assert (first.text[0], second.text[0]) == ("2", "4")


def test_a_rewritten_turn_without_a_generation_prompt_is_refused() -> None:
    template = "{{ messages | length }}" + PLAIN_TEMPLATE.split("{% if add_generation_prompt %}")[0]
    with pytest.raises(ChatTemplateError, match="differently once it follows") as caught:
        learned(template, conversation(*TWO_TURNS))
    assert caught.value.field == "messages[2]"


def test_an_answer_that_begins_as_the_rest_of_the_prompt_is_learned_whole() -> None:
    template = PLAIN_TEMPLATE.replace("assistant\n{%", "assistant\n<think>{%")
    (rendered,) = ChatRenderer(make_tokenizer(template)).render(conversation(("user", "a"), ("assistant", "<thorn>")))
    assert [rendered.text[start:stop] for start, stop in rendered.targets] == ["<thorn><|im_end|>"]
    assert "generation prompt ends with '<think>'" in rendered.notes[0]


def test_an_assistant_message_that_begins_a_conversation_is_learned() -> None:
    turns = (("assistant", "hello"), ("user", "a"), ("assistant", "b"))
    assert learned(PLAIN_TEMPLATE, conversation(*turns))[1] == ["hello<|im_end|>", "b<|im_end|>"]
    assert learned(PLAIN_TEMPLATE, conversation(*turns, weights=(0, 0, 1)))[1] == ["b<|im_end|>"]


def test_two_assistant_messages_in_a_row_are_both_learned() -> None:
    turns = (("user", "a"), ("assistant", "b"), ("assistant", "c"))
    assert learned(PLAIN_TEMPLATE, conversation(*turns))[1] == ["b<|im_end|>", "c<|im_end|>"]


def test_a_template_that_refuses_the_conversation_is_quoted() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system prompt, please') }}{% endif %}"
    with pytest.raises(ChatTemplateError, match="no system prompt, please"):
        learned(template + PLAIN_TEMPLATE, conversation(*TWO_TURNS))


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ (raise_exception.__globals__ | attr('get'))('os') }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "SecurityError"),
        ("{{ '{0.__init__.__globals__}'.format(messages) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{% extends '/etc/passwd' %}", "no loader"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", "OverflowError"),
        ("{{ 'x' * 10 ** 16 }}", "MemoryError"),
        ("{{ 'x' * 10 ** 30 }}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages[99].content.x }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ " + "(" * 10_000 + ")" * 10_000 + " }}", "Error"),
    ],
)
def test_a_hostile_template_gets_nowhere(part: str, complaint: str) -> None:
    with pytest.raises(ChatTemplateError, match=complaint):
        learned(part + PLAIN_TEMPLATE, conversation(*TWO_TURNS))


def test_a_format_in_a_template_sees_nothing_of_the_inside() -> None:
    part = "{{ '{0.__class__}'.format(messages) }}"
    assert learned(part + PLAIN_TEMPLATE, conversation(*TWO_TURNS)) == learned(PLAIN_TEMPLATE, conversation(*TWO_TURNS))
