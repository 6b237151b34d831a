"""Chat templates that drop or spoil a part of a conversation are refused, with the part's field and the reason."""

from typing import Any

import pytest

from tests.support.engine.chat_templates import FAMILIES, QWEN3
from tests.support.engine.folders import PLAIN_TEMPLATE, make_tokenizer
from tests.unit.engine.data.chat.test_families import CALLS, SEVEN, TOOLS, call, example, says, tokenizer_of, user
from windlass.engine.data.chat.conversation import ChatRenderer, ChatTemplateError
from windlass.engine.data.examples import ChatExample

ASKED = example(user("a"), says("b c"))


def refusal(template: str, given: ChatExample) -> ChatTemplateError:
    with pytest.raises(ChatTemplateError) as caught:
        list(ChatRenderer(make_tokenizer(template)).render(given))
    return caught.value


def learned(template: str, given: ChatExample) -> list[str]:
    rendered = ChatRenderer(make_tokenizer(template)).render(given)
    return [item.text[start:stop] for item in rendered for start, stop in item.targets]


def calling(how: str) -> str:
    """A ChatML template that prints each tool call of a message with `how`."""
    calls = "{% for c in m.tool_calls or [] %}" + how + "{% endfor %}<|im_end|>"
    return PLAIN_TEMPLATE.replace("{{ m.content }}<|im_end|>", "{{ m.content or '' }}" + calls)


def test_tool_calls_that_the_template_ignores_are_refused() -> None:
    error = refusal(PLAIN_TEMPLATE, example(user("q"), CALLS, SEVEN, says("seven")))
    assert (error.field, "drops it" in str(error)) == ("messages[1].tool_calls", True)


@pytest.mark.parametrize(
    ("how", "field", "complaint"),
    [
        ("{{ c.function.name }}", "messages[1].tool_calls[0].function.arguments", "drops it"),
        ("{{ c.function.arguments | tojson }}", "messages[1].tool_calls[0].function.name", "drops it"),
        ("{{ raise_exception('no tools, please') }}", "messages[1]", "fails: no tools, please"),
    ],
)
def test_half_a_tool_call_is_refused(how: str, field: str, complaint: str) -> None:
    error = refusal(calling(how), example(user("q"), CALLS, SEVEN, says("seven")))
    assert (error.field, complaint in str(error)) == (field, True)


@pytest.mark.parametrize("arguments", ['{"x":1, "y":"é"}', {"x": 1, "y": "é"}])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("{{ c.function | tojson }}", ['{"name": "f", "arguments": {"x": 1, "y": "é"}}']),
        ("{{ c.function.name + (c.function.arguments | tojson) }}", ['f{"x": 1, "y": "é"}']),
        # A template that concatenates text gets the arguments as their author wrote them.
        ("{{ c.function.name + c.function.arguments }}", ['f{"x":1, "y":"é"}', 'f{"x": 1, "y": "é"}']),
        # If printed, an object would have Python's spelling.
        ("{{ c.function.name }}{{ c.function.arguments }}", ['f{"x":1, "y":"é"}', 'f{"x": 1, "y": "é"}']),
        (
            "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}",
            ["f<x>1<y>é"],
        ),
    ],
)
def test_arguments_are_written_as_the_template_takes_them(how: str, expected: list[str], arguments: Any) -> None:
    given = example(user("q"), says(None, tool_calls=[call("f", arguments)]), SEVEN, says("seven"))
    as_written = expected[0] if isinstance(arguments, str) else expected[-1]
    assert learned(calling(how), given) == [as_written + "<|im_end|>", "seven<|im_end|>"]


def test_a_question_that_quotes_arguments_in_pythons_spelling_is_learned() -> None:
    how = "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}"
    given = example(user("Call f with {'x': 'z'}."), says(None, tool_calls=[call("f", {"x": "z"})]), SEVEN, says("7"))
    assert learned(calling(how), given) == ["f<x>z<|im_end|>", "7<|im_end|>"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [({"x": {"y": "z"}}, "Python's spelling"), ({"x": None}, "prints null as the word None")],
)
def test_values_in_pythons_spelling_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    template = calling(
        "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}"
    )
    given = example(user("q"), says(None, tool_calls=[call("f", arguments)]))
    assert complaint in str(refusal(template, given))


def test_null_as_json_and_none_as_a_word_of_the_user_are_learned() -> None:
    template = calling("{{ c.function | tojson }}")
    given = example(user("None?"), says(None, tool_calls=[call("f", {"x": None})]), SEVEN, says("None"))
    assert learned(template, given) == ['{"name": "f", "arguments": {"x": null}}<|im_end|>', "None<|im_end|>"]


def test_a_missing_content_is_written_as_an_empty_text_where_null_would_be_printed() -> None:
    template = calling("{{ c.function | tojson }}").replace("{{ m.content or '' }}", "{{ m.content }}")
    parts = learned(template, example(user("q"), CALLS))
    assert parts == ['{"name": "f", "arguments": {"x": 1}}<|im_end|>']
    as_json = template.replace("{{ m.content }}", "{{ m.content | tojson }}")
    assert learned(as_json, example(user("q"), CALLS)) == ['""{"name": "f", "arguments": {"x": 1}}<|im_end|>']


SYSTEM = {"role": "system", "content": "s"}
DEVELOPER = {"role": "developer", "content": "s"}
EACH = "{% for m in messages %}"
SAID = "{{ m.content }}"
ROLE = "{{ m.role }}"


@pytest.mark.parametrize(
    ("part", "replacement", "given", "field"),
    [
        (SAID, "", ASKED, "messages[0].content"),
        (SAID, "{{ m.content if m.role != 'user' }}", ASKED, "messages[0].content"),
        (SAID, "{{ m.content[:4] }}", example(user("a question"), says("b")), "messages[0].content"),
        (
            SAID,
            "{{ m.content[-4:] if m.role == 'assistant' else m.content }}",
            example(user("a"), says("an answer")),
            "messages[1].content",
        ),
        (EACH, EACH[:-3] + " if m.role != 'system' %}", example(SYSTEM, user("a"), says("b")), "messages[0].content"),
        (
            EACH,
            EACH[:-3] + " if m.role != 'developer' %}",
            example(DEVELOPER, user("a"), says("b")),
            "messages[0].content",
        ),
        (
            EACH,
            EACH[:-3] + " if m.role != 'tool' %}",
            example(user("a"), says("b"), SEVEN, says("c")),
            "messages[2].content",
        ),
        (EACH, EACH, example(user("a"), says("b"), tools=TOOLS), "tools[0]"),
        (EACH, EACH, example(user("a"), says("b"), tools=({"type": "python"},)), "tools"),
        (ROLE, "", ASKED, "messages[0].role"),
        (
            ROLE,
            "{{ 'user' if m.role == 'user' else 'assistant' }}",
            example(user("a"), says("b"), SEVEN, says("c")),
            "messages[2].role",
        ),
        (
            ROLE,
            "{{ 'assistant' if m.role == 'assistant' else 'user' }}",
            example(SYSTEM, user("a"), says("b")),
            "messages[0].role",
        ),
    ],
)
def test_a_dropped_part_is_refused(part: str, replacement: str, given: ChatExample, field: str) -> None:
    error = refusal(PLAIN_TEMPLATE.replace(part, replacement), given)
    assert (error.field, "drops" in str(error)) == (field, True)


def test_what_a_template_trims_or_writes_as_json_is_not_dropped() -> None:
    template = PLAIN_TEMPLATE.replace(
        "{{ m.content }}", "{{ m.content | trim if m.role != 'tool' else m.content | tojson }}"
    )
    tool = SEVEN | {"content": 'é "7"\n '}
    assert learned(template, example(user(" a\n"), says(" b "), tool, says("c\n"))) == ["b<|im_end|>", "c<|im_end|>"]


def test_an_empty_message_is_not_dropped() -> None:
    assert learned(PLAIN_TEMPLATE, example(user(""), says(""), user(" "), says("c"))) == ["<|im_end|>", "c<|im_end|>"]


def test_messages_that_no_weight_is_learned_of_are_not_checked() -> None:
    given = example(user("a"), says("b", reasoning_content="r"), silent=(1,))
    (rendered,) = ChatRenderer(make_tokenizer(PLAIN_TEMPLATE)).render(given)
    assert rendered.targets == ()


def test_reasoning_of_a_message_of_weight_0_may_be_dropped() -> None:
    given = example(user("a"), says("b", reasoning_content="r"), user("c"), says("d"), silent=(1,))
    assert learned(PLAIN_TEMPLATE, given) == ["d<|im_end|>"]


@pytest.mark.parametrize("name", ["thinking", "reasoning_content"])
def test_a_template_finds_the_reasoning_under_both_names(name: str) -> None:
    template = PLAIN_TEMPLATE.replace("{{ m.content }}", "{{ m." + name + " or '' }}{{ m.content }}")
    assert learned(template, example(user("a"), says("b", reasoning_content="r1"))) == ["r1b<|im_end|>"]


@pytest.mark.parametrize(
    ("family", "message", "field", "complaint"),
    [
        ("llama3", says(None, tool_calls=[call("f", {}), call("g", {})]), "messages[1]", "only single tool-calls"),
        ("llama3", says("so", tool_calls=[call("f", {})]), "messages[1].content", "drops it"),
        ("mistral", says(None, tool_calls=[call("f", {}, "call_1")]), "messages[1]", "with length 9"),
        ("gemma3", user("again"), "messages[1]", "roles must alternate"),
        ("gpt-oss", SEVEN, "messages[1]", "without a call before it"),
        ("qwen2.5", {"role": "developer", "content": "d"}, "messages[1].content", "write role system"),
        (
            "gpt-oss",
            says("so", tool_calls=[call("f", {})], reasoning_content="r"),
            "messages[1]",
            "Cannot pass both content and thinking",
        ),
    ],
)
def test_a_familys_own_refusal_names_the_message(family: str, message: Any, field: str, complaint: str) -> None:
    given = example(user("q"), message, user("and"), says("yes"))
    with pytest.raises(ChatTemplateError, match=complaint) as caught:
        list(ChatRenderer(tokenizer_of(FAMILIES[family])).render(given))
    assert caught.value.field == field


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "mistral"])
def test_parallel_calls_and_their_answers_are_learned(family: str) -> None:
    calls = says(None, tool_calls=[call("f", {"x": 1}), call("g", {"y": [2]}, "ihgfedcba")])
    answers = [SEVEN, SEVEN | {"content": "8", "tool_call_id": "ihgfedcba"}]
    rendered = list(ChatRenderer(tokenizer_of(FAMILIES[family])).render(example(user("q"), calls, *answers, says("x"))))
    parts = [item.text[start:stop] for item in rendered for start, stop in item.targets]
    assert [("f" in part, '"g"' in part, '"y": [2]' in part) for part in parts] == [(True, True, True), (False,) * 3]


def test_a_field_that_the_template_does_not_read_is_told_of_once() -> None:
    renderer = ChatRenderer(make_tokenizer(PLAIN_TEMPLATE))
    named = user("a") | {"name": "Ann", "time": 3}
    (first,), (second,) = (list(renderer.render(example(named, says("b")))) for _ in range(2))
    assert [note.split('"')[1] for note in first.notes] == ["name", "time"]
    assert second.notes == ()
    reads_name = PLAIN_TEMPLATE.replace("{{ m.role }}", "{{ m.role }}{{ m.name }}")
    (item,) = ChatRenderer(make_tokenizer(reads_name)).render(example(user("a") | {"name": "Ann"}, says("b")))
    assert item.notes == ()


def test_a_tools_name_in_its_answer_may_be_left_out() -> None:
    (item,) = ChatRenderer(tokenizer_of(FAMILIES["qwen2.5"])).render(
        example(user("q"), CALLS, SEVEN | {"name": "f"}, says("seven"))
    )
    assert item.notes == ()


def test_reasoning_in_the_content_that_only_the_last_turn_keeps_is_learned_there() -> None:
    thinks = says("<think>why</think>b")
    parts = learned(QWEN3, example(user("a"), thinks, user("c"), says("d")))
    assert parts[0] == "<think>\nwhy\n</think>\n\nb<|im_end|>"
