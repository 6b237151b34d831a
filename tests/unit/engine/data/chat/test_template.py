from datetime import date, datetime

import pytest

from tests.support.engine.folders import PLAIN_TEMPLATE, make_tokenizer
from windlass.engine.data.chat.template import ChatTemplate, ChatTemplateError, Conversation, conversations_of
from windlass.engine.data.examples import ChatExample

ASKED = Conversation(messages=({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), tools=None)


def rendered(template: str, day: date) -> str:
    return ChatTemplate(make_tokenizer(template), day).render(ASKED)


@pytest.mark.parametrize("form", ["%d %b %Y", "%Y-%m-%d", "%A, %B %-d", "%H:%M", "day %j, 100%%"])
@pytest.mark.parametrize("day", [date(2026, 7, 9), date(2024, 12, 31)])
def test_a_templates_current_day_is_the_given_one(form: str, day: date) -> None:
    template = (
        "\n{{ strftime_now('" + form + "') }}{% macro head() %}{{ strftime_now('%Y') }}{% endmacro %}{{ head() }}"
    )
    expected = datetime(day.year, day.month, day.day).strftime(form)
    assert rendered(template, day) == f"\n{expected}{day.year}"


def test_a_template_sees_that_it_can_ask_for_the_day() -> None:
    assert rendered("{{ strftime_now is defined }}", date(2026, 7, 9)) == "True"


def test_an_error_names_the_message_or_the_tools() -> None:
    part = "{{ raise_exception('no') if messages | length > 1 or tools }}"
    template = ChatTemplate(make_tokenizer(part + PLAIN_TEMPLATE), date(2026, 7, 9))
    for conversation, field in (
        (ASKED, "messages[1]"),
        (Conversation(messages=ASKED.messages[:1], tools=({"name": "f"},)), "tools"),
    ):
        with pytest.raises(ChatTemplateError) as caught:
            template.render(conversation)
        located = template.locate(conversation, caught.value)
        assert (str(located), located.field) == ("the chat template fails: no", field)


def test_a_conversation_without_tool_calls_has_one_form() -> None:
    assert list(conversations_of(ChatExample(messages=ASKED.messages, tools=None, weights=(0, 1)))) == [ASKED]


def test_forms_differ_in_the_missing_content_and_in_how_arguments_are_written() -> None:
    call = {"function": {"name": "f", "arguments": '{"x":1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    forms = conversations_of(ChatExample(messages=(message,), tools=None, weights=(1,)))
    assert [(m["content"], m["tool_calls"][0]["function"]["arguments"]) for f in forms for m in f.messages] == [
        (None, {"x": 1}),
        ("", {"x": 1}),
        (None, '{"x":1}'),
        ("", '{"x":1}'),
    ]
