"""Finds the characters to learn in a text whose chat template marks them with `{% generation %}`."""

from dataclasses import dataclass

from windlass.engine.data.chat.parts import Part, marked, parts_of
from windlass.engine.data.chat.template import ChatTemplate, ChatTemplateError, Conversation

Span = tuple[int, int]  # (first character, past-last character)


@dataclass(frozen=True, slots=True)
class _Place:
    """The first place of a part of the conversation in the text."""

    start: int
    part: Part
    message: int


def marked_targets(template: ChatTemplate, conversation: Conversation, learned: frozenset[int]) -> tuple[Span, ...]:
    """Returns the generation blocks of the messages to learn. The template's marks decide where a turn begins and ends.

    Raises:
        ChatTemplateError: the blocks lack the content or a tool call of a message to learn. Or they hold a message of
            another role. Or some messages are not to be learned, and it is unclear which blocks are theirs.
    """
    _, spans = template.render_with_marks(conversation)
    parts = [part for part in parts_of(conversation, learned) if part.message is not None]
    text, spans_with_parts = template.render_with_marks(marked(conversation, parts))
    places = sorted(
        (_Place(text.find(part.mark), part, part.message or 0) for part in parts if part.mark in text),
        key=lambda place: place.start,
    )
    roles = [message["role"] for message in conversation.messages]
    for place in places:
        is_inside = any(start <= place.start < stop for start, stop in spans_with_parts)
        if place.message in learned and place.part.is_said and not is_inside:
            raise ChatTemplateError(
                f"the chat template's {{% generation %}} marks do not cover {place.part.field}, so it would not be "
                "learned; give the message weight 0, or use a chat template that marks it",
                place.part.field,
            )
        if roles[place.message] != "assistant" and is_inside:
            raise ChatTemplateError(
                f"the chat template's {{% generation %}} marks cover {place.part.field}, a part of a "
                f"{roles[place.message]} message",
                place.part.field,
            )
    if not spans:
        raise ChatTemplateError("the chat template's {% generation %} marks cover nothing of the conversation")
    if all(role != "assistant" or i in learned for i, role in enumerate(roles)):
        return tuple(spans)
    if len(spans) != len(spans_with_parts):
        raise _not_told_apart(len(spans))
    owners = [_is_learned(span, places, roles, learned) for span in spans_with_parts]
    if None in owners:
        raise _not_told_apart(len(spans))
    return tuple(span for span, is_learned in zip(spans, owners, strict=True) if is_learned)


def _is_learned(span: Span, places: list[_Place], roles: list[str], learned: frozenset[int]) -> bool | None:
    """Checks whether a generation block belongs to a message to learn; None if that is unclear."""
    inside = {place.message for place in places if span[0] <= place.start < span[1]}
    if not inside:  # for example a block that holds only an end-of-turn token
        before = [place.message for place in places if place.start < span[0]][-1:]
        after = [place.message for place in places if place.start >= span[1]][:1]
        inside = {message for message in before + after if roles[message] == "assistant"}
    answers = {message in learned for message in inside}
    return answers.pop() if len(answers) == 1 else None


def _not_told_apart(num_blocks: int) -> ChatTemplateError:
    return ChatTemplateError(
        f"the chat template marks {num_blocks} parts as the assistant's, and it is unclear which belong to the "
        "messages of weight 0"
    )
