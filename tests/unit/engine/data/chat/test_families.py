"""The exact text that is learned from each conversation, with each family's chat template."""

from datetime import date
from typing import Any

import pytest

from tests.support.engine.chat_templates import FAMILIES, SPECIAL_TOKENS, Family
from tests.support.engine.folders import make_tokenizer
from windlass.engine.data.chat.conversation import ChatRenderer, ChatTemplateError
from windlass.engine.data.examples import ChatExample

DAY = date(2026, 7, 9)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def says(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, arguments: Any, identifier: str = "abcdefghi") -> dict[str, Any]:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def example(*messages: dict[str, Any], silent: tuple[int, ...] = (), tools: Any = None) -> ChatExample:
    """An example in which all assistant messages except the `silent` ones are learned."""
    weights = tuple(int(m["role"] == "assistant" and i not in silent) for i, m in enumerate(messages))
    return ChatExample(messages=messages, tools=tools, weights=weights)


SYSTEM = {"role": "system", "content": "s"}
TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
CALLS = says(None, tool_calls=[call("f", '{"x":1}')])
SEVEN = {"role": "tool", "content": "7", "tool_call_id": "abcdefghi"}

CONVERSATIONS = {
    "one turn": example(user("a"), says("b c")),
    "system": example(SYSTEM, user("a"), says("b c")),
    "several": example(user("a"), says("b c"), user("d"), says("e"), user("bye")),
    "weight 0 first": example(user("a"), says("b c"), user("d"), says("e"), silent=(1,)),
    "weight 0 last": example(user("a"), says("b c"), user("d"), says("e"), silent=(3,)),
    "system, several": example(SYSTEM, user("a"), says("b c"), user("d"), says("e")),
    "call": example(user("q"), CALLS, SEVEN, says("seven")),
    "tools": example(user("q"), CALLS, SEVEN, says("seven"), tools=TOOLS),
    "reasoning": example(user("a"), says("b c", reasoning_content="r1"), user("d"), says("e", reasoning_content="r2")),
    "reasoning and call": example(
        *(user("a"), says("b c", reasoning_content="r0"), user("q")),
        *({**CALLS, "reasoning_content": "r1"}, SEVEN, says("seven", reasoning_content="r2")),
        tools=TOOLS,
    ),
    "greeting": example(says("hi"), user("a"), says("b c")),
    "system, greeting": example(SYSTEM, says("hi"), user("a"), says("b c")),
    "think in content": example(user("a"), says("<think>\nr1\n</think>\n\nb c"), user("d"), says("e")),
}

# The learned parts of each conversation: a list of parts for each example, or the field and reason of the refusal.
PLAIN = {
    "one turn": [["b c$"]],
    "system": [["b c$"]],
    "several": [["b c$", "e$"]],
    "weight 0 first": [["e$"]],
    "weight 0 last": [["b c$"]],
    "system, several": [["b c$", "e$"]],
    "greeting": [["hi$", "b c$"]],
    "system, greeting": [["hi$", "b c$"]],
    "think in content": [["<think>\nr1\n</think>\n\nb c$", "e$"]],
    "reasoning": ("messages[1].reasoning_content", "drops it"),
    "reasoning and call": ("messages[1].reasoning_content", "drops it"),
}
NO_THOUGHT = "<think>\n\n</think>\n\n"
QWEN3 = {
    "one turn": [["<think>\n\n</think>\n\nb c$"]],
    "system": [[NO_THOUGHT + "b c$"]],
    "several": [[NO_THOUGHT + "b c$"], [NO_THOUGHT + "e$"]],
    "weight 0 first": [[NO_THOUGHT + "e$"]],
    "weight 0 last": [[NO_THOUGHT + "b c$"]],
    "system, several": [[NO_THOUGHT + "b c$"], [NO_THOUGHT + "e$"]],
    "greeting": [[NO_THOUGHT + "hi$"], [NO_THOUGHT + "b c$"]],
    "system, greeting": [[NO_THOUGHT + "hi$"], [NO_THOUGHT + "b c$"]],
    "call": [
        [NO_THOUGHT + '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>$'],
        [NO_THOUGHT + "seven$"],
    ],
    "reasoning": [["<think>\nr1\n</think>\n\nb c$"], ["<think>\nr2\n</think>\n\ne$"]],
    # The template keeps the reasoning since the last question, so the call and the answer share an example.
    "reasoning and call": [
        ["<think>\nr0\n</think>\n\nb c$"],
        [
            '<think>\nr1\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>$',
            "<think>\nr2\n</think>\n\nseven$",
        ],
    ],
    "think in content": [["<think>\nr1\n</think>\n\nb c$"], [NO_THOUGHT + "e$"]],
}
QWEN3["tools"] = QWEN3["call"]


def opened(expected: Any) -> Any:
    """The same parts with a generation prompt that opens the reasoning of each turn."""
    return [[part.removeprefix("<think>\n") for part in parts] for parts in expected]


def final(content: str) -> str:
    return f"<|channel|>final<|message|>{content}<|return|>"


def thought(content: str) -> str:
    return f"<|channel|>analysis<|message|>{content}<|end|><|start|>assistant"


GPT_OSS_CALL = ' to=functions.f<|channel|>commentary json<|message|>{"x": 1}<|call|>'
ALTERNATE = ("messages[2]", "roles must alternate")
LLAMA3_CALL = [['{"name": "f", "parameters": {"x": 1}}$', "seven$"]]
QWEN2_5_CALL = [['<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>$', "seven$"]]
MISTRAL_CALL = [['[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]$', " seven$"]]

EXPECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5": ("<|im_end|>", PLAIN | {"call": QWEN2_5_CALL, "tools": QWEN2_5_CALL}),
    "qwen3": ("<|im_end|>", QWEN3),
    "qwen3-thinking": ("<|im_end|>", {name: opened(expected) for name, expected in QWEN3.items()}),
    "llama3": ("<|eot_id|>", PLAIN | {"call": LLAMA3_CALL, "tools": LLAMA3_CALL}),
    "llama3-day": ("<|eot_id|>", PLAIN | {"call": LLAMA3_CALL, "tools": LLAMA3_CALL}),
    "gemma2": (
        "<end_of_turn>",
        PLAIN
        | dict.fromkeys(("system", "system, several", "system, greeting"), ("messages[0]", "System role not supported"))
        | dict.fromkeys(("call", "tools"), ALTERNATE)
        | {"reasoning and call": ("messages[4]", "roles must alternate")}
        | {"greeting": ("messages[0]", "roles must alternate")},
    ),
    "gemma3": (
        "<end_of_turn>",
        PLAIN
        | dict.fromkeys(("call", "tools"), ALTERNATE)
        | {"reasoning and call": ("messages[4]", "roles must alternate")}
        | {"greeting": ("messages[0]", "roles must alternate")}
        | {"system, greeting": ("messages[1]", "roles must alternate")},
    ),
    "mistral": (
        "</s>",
        {
            name: [[f" {part}" for part in parts] for parts in e] if isinstance(e, list) else e
            for name, e in PLAIN.items()
        }
        # The system prompt and the tools are in the last question, so earlier answers are separate examples.
        | {"system, several": [[" b c$"], [" e$"]], "call": MISTRAL_CALL, "tools": MISTRAL_CALL}
        # Without a generation prompt, an answer without a question begins where the renderings of two answers differ.
        | {"greeting": [["hi$", " b c$"]]},
    ),
    # A conversation that ends with an answer is closed with end-of-text, which is learned there.
    "phi3": (
        "<|end|>",
        PLAIN
        | {
            "one turn": [["b c$\n</s>"]],
            "system": [["b c$\n</s>"]],
            "weight 0 first": [["e$\n</s>"]],
            "system, several": [["b c$", "e$\n</s>"]],
            "greeting": [["hi$", "b c$\n</s>"]],
            "system, greeting": [["hi$", "b c$\n</s>"]],
            "think in content": [["<think>\nr1\n</think>\n\nb c$", "e$\n</s>"]],
            "call": ("messages[1].tool_calls", "drops it"),
            "tools": ("messages[1].tool_calls", "drops it"),
            "reasoning and call": ("messages[3].tool_calls", "drops it"),
        },
    ),
    "gpt-oss": (
        "<|return|>",
        {
            "one turn": [[final("b c")]],
            "system": [[final("b c")]],
            "several": [[final("b c")], [final("e")]],
            "weight 0 first": [[final("e")]],
            "weight 0 last": [[final("b c")]],
            "system, several": [[final("b c")], [final("e")]],
            "greeting": [[final("hi")], [final("b c")]],
            "system, greeting": [[final("hi")], [final("b c")]],
            "call": [[GPT_OSS_CALL, final("seven")]],
            "tools": [[GPT_OSS_CALL, final("seven")]],
            "reasoning": [[thought("r1") + final("b c")], [thought("r2") + final("e")]],
            "reasoning and call": [
                [thought("r0") + final("b c")],
                # The answer drops the reasoning before the call, but the model answers to a prompt that has it.
                [thought("r1") + GPT_OSS_CALL, thought("r2") + final("seven")],
            ],
            "think in content": [[final("<think>\nr1\n</think>\n\nb c")], [final("e")]],
        },
    ),
    "deepseek-r1": (
        "<｜eos｜>",
        PLAIN
        | {
            "call": [['<｜calls｜><｜call｜>f\n{"x":1}<｜/call｜><｜/calls｜>$', "seven$"]],
            "tools": ("tools[0]", "drops it"),
            "think in content": ("messages[1].content", "drops it"),
        },
    ),
    "deepseek-v3.1": (
        "<｜eos｜>",
        PLAIN
        | {
            "call": [['<｜calls｜><｜call｜>f<｜sep｜>{"x":1}<｜/call｜><｜/calls｜>$', "seven$"]],
            "tools": ("tools[0]", "drops it"),
        },
    ),
}


def tokenizer_of(family: Family) -> Any:
    tokenizer = make_tokenizer(family.template)
    tokenizer.add_special_tokens(
        {"bos_token": family.bos, "eos_token": family.eos, "additional_special_tokens": list(SPECIAL_TOKENS)}
    )
    return tokenizer


@pytest.fixture(scope="module")
def renderers() -> dict[str, ChatRenderer]:
    return {name: ChatRenderer(tokenizer_of(family), DAY) for name, family in FAMILIES.items()}


CASES = [(family, conversation) for family in FAMILIES for conversation in CONVERSATIONS]


@pytest.mark.parametrize(("family", "conversation"), CASES)
def test_a_familys_conversation_is_learned_exactly(
    renderers: dict[str, ChatRenderer], family: str, conversation: str
) -> None:
    end, expectations = EXPECTED[family]
    expected, given = expectations[conversation], CONVERSATIONS[conversation]
    if isinstance(expected, tuple):
        with pytest.raises(ChatTemplateError, match=expected[1]) as caught:
            list(renderers[family].render(given))
        assert caught.value.field == expected[0]
        return
    rendered = list(renderers[family].render(given))
    learned = [[item.text[start:stop] for start, stop in item.targets] for item in rendered]
    assert learned == [[part.replace("$", end) for part in parts] for parts in expected]
    # The text before the last learned part is the model's prompt at that point of the conversation.
    if family != "deepseek-r1":
        last = max(i for i, weight in enumerate(given.weights) if weight)
        prompt = rendered[-1].text[: rendered[-1].targets[-1][0]]
        assert prompt == prompt_of(family, given, last)


def prompt_of(family: str, given: ChatExample, index: int) -> str:
    """The prompt from transformers' own function, with tool calls in the template's form."""
    tokenizer = tokenizer_of(FAMILIES[family])
    messages = [dict(message) for message in given.messages[:index]]
    for message in messages:
        if "tool_calls" in message:
            message["tool_calls"] = [call("f", '{"x":1}' if "deepseek" in family else {"x": 1})]
    template = tokenizer.chat_template.replace("strftime_now('%Y-%m-%d')", "'2026-07-09'")
    template = template.replace("strftime_now('%d %b %Y')", "'09 Jul 2026'")
    text: str = tokenizer.apply_chat_template(
        messages,
        tools=list(given.tools or ()) or None,
        chat_template=template,
        tokenize=False,
        add_generation_prompt=True,
    )
    return text
