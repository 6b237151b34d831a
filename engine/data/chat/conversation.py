"""Renders conversations by the model's chat template, and finds the characters that the assistant wrote."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from typing import Any

from windlass.engine.data import ChatExample
from windlass.engine.data.chat.checks import ConversationChecks
from windlass.engine.data.chat.marks import marked_targets
from windlass.engine.data.chat.template import (
    ChatTemplate,
    ChatTemplateError,
    Conversation,
    conversations_of,
    is_refusal,
)

__all__ = ["ChatRenderer", "ChatTemplateError", "RenderedText"]

# An answer for comparison. It begins with a private-use character, with which no real message begins.
_OTHER_MESSAGE = {"role": "assistant", "content": "\ue000"}
_QUESTION = Conversation(messages=({"role": "user", "content": "a"},), tools=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedText:
    """A text and the character ranges to learn."""

    text: str
    targets: tuple[tuple[int, int], ...]  # (first character, past-last character), ascending
    notes: tuple[str, ...] = ()  # warnings for the user; the same cause has the same text


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """An assistant message, rendered as the conversation's last one."""

    index: int  # of its message
    text: str  # the conversation up to the message's end: the prompt and the model's answer
    start: int  # first character of its part to learn
    missing_prompt: str  # end of the generation prompt that the rendered message lacks


class ChatRenderer:
    """Renders conversations with the chat template of a tokenizer.

    The model learns the text of an assistant's turn and the token that ends the turn, not the header before it. If the
    template marks this part with `{% generation %}`, the marks decide. Otherwise the template renders the turn as the
    last message, and the part to learn begins after the generation prompt.

    Turns share an example as long as the template renders them the same way when more messages follow. Otherwise a turn
    begins a new example: the prompt that the model gets at that point, and the turn.

    `day` is the date that templates print; the default is the day on which the renderer is made.
    """

    def __init__(self, tokenizer: Any, day: date | None = None) -> None:
        self._template = ChatTemplate(tokenizer, day or date.today())
        self._checks = ConversationChecks(self._template)

    @property
    def has_template(self) -> bool:
        """True if the tokenizer has any chat template."""
        return self._template.exists

    def render(self, example: ChatExample) -> Iterator[RenderedText]:
        """Renders a conversation as one or more training examples. Messages of weight 1 are learned.

        A conversation without a message to learn gives one text without targets.

        Raises:
            ChatTemplateError: the template fails on a part of the conversation or drops it; the error names the part.
        """
        conversation = self._in_supported_form(example)
        learned = tuple(i for i, weight in enumerate(example.weights) if weight)
        if not learned:
            yield RenderedText(text=self._render(conversation), targets=())
        elif self._template.has_marks(conversation):
            yield self._render_marked(conversation, frozenset(learned))
        else:
            yield from self._render_turns(conversation, learned)

    def _in_supported_form(self, example: ChatExample) -> Conversation:
        """Returns the conversation in the first form whose tool calls and missing contents the template renders."""
        forms = list(conversations_of(example))
        if len(forms) == 1:
            return forms[0]
        errors: list[ChatTemplateError] = []
        for conversation in forms:
            try:
                self._checks.check_form(conversation, self._render(conversation))
            except ChatTemplateError as error:
                errors.append(error)
            else:
                return conversation
        # The template's own refusal explains most. Else the error of the last form, on which the fewest templates fail.
        found = [error for error in errors if error.__cause__ is None]
        raise next(filter(is_refusal, errors), (found or errors)[-1])

    def _render(self, conversation: Conversation) -> str:
        try:
            return self._template.render(conversation)
        except ChatTemplateError as error:
            raise self._template.locate(conversation, error) from error.__cause__

    def _render_marked(self, conversation: Conversation, learned: frozenset[int]) -> RenderedText:
        text = self._render(conversation)
        notes = self._checks.check(conversation, learned, text, is_marked=True)
        targets = marked_targets(self._template, conversation, learned)
        return RenderedText(text=text, targets=targets, notes=notes)

    def _render_turns(self, conversation: Conversation, learned: tuple[int, ...]) -> Iterator[RenderedText]:
        whole = self._render(conversation)
        turns: list[_Turn] = []  # those that share the current example
        ends: list[int] = []
        for index in learned:
            turn = self._turn(conversation, index)
            if turns and (end := self._end_within(conversation, turns[-1], turn.text)) is not None:
                ends[-1] = end
            elif turns:
                yield self._example(conversation.first(turns[-1].index + 1), turns, ends, turns[-1].text)
                turns, ends = [], []
            turns.append(turn)
            ends.append(self._end_of_turn(turn.text, turn.start, len(turn.text)))
        if (end := self._end_within(conversation, turns[-1], whole)) is not None:
            ends[-1] = end
            yield self._example(conversation, turns, ends, whole)
        else:
            yield self._example(conversation.first(turns[-1].index + 1), turns, ends, turns[-1].text)

    def _example(self, conversation: Conversation, turns: list[_Turn], ends: list[int], text: str) -> RenderedText:
        notes = self._checks.check(conversation, frozenset(turn.index for turn in turns), text)
        for missing in {turn.missing_prompt: None for turn in turns if turn.missing_prompt}:
            notes += (
                f"the chat template's generation prompt ends with {missing!r}, but the template renders assistant "
                "messages without it: they are learned from that place on, and do not fit the prompt that the model is "
                "used with",
            )
        targets = tuple((turn.start, end) for turn, end in zip(turns, ends, strict=True))
        return RenderedText(text=text, targets=targets, notes=notes)

    def _turn(self, conversation: Conversation, index: int) -> _Turn:
        before, through = conversation.first(index), conversation.first(index + 1)
        text = self._render(through)
        other = self._template.try_render(through.with_message(index, _OTHER_MESSAGE)) or text
        if index == 0:
            return self._greeting(text, other)
        try:
            prompt = self._template.render(before, prompt=True)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{error.message} (on the messages before it)", f"messages[{index}]") from error
        if text.startswith(prompt):
            return _Turn(index=index, text=text, start=len(prompt), missing_prompt="")
        others = text, other
        conversation_end = _num_common(prompt, self._template.try_render(before) or prompt)
        start = min(self._num_shared(prompt, other) for other in others)
        if start > self._token_start(prompt, conversation_end):
            return _Turn(index=index, text=text, start=start, missing_prompt=prompt[start:])
        # The template renders earlier messages differently now. gpt-oss, for example, drops the reasoning before an
        # answer.
        opening = prompt[conversation_end:]
        place = text.rfind(opening, 0, self._num_shared(*others)) if opening else -1
        if place < 0:
            raise ChatTemplateError(
                "the chat template renders the messages before it differently once it follows, so what the model would "
                "have to answer to is unknown; give it weight 0, or use a chat template with {% generation %} marks",
                f"messages[{index}]",
            )
        generated = text[place + len(opening) :]
        return _Turn(index=index, text=prompt + generated, start=len(prompt), missing_prompt="")

    def _greeting(self, text: str, other: str) -> _Turn:
        """Renders an assistant message that is the first message.

        Most templates fail on an empty conversation, so the generation prompt is that of a one-letter question.
        """
        prompt = self._template.try_render(_QUESTION, prompt=True) or ""
        opening = prompt[_num_common(prompt, self._template.try_render(_QUESTION) or prompt) :]
        num_shared = self._num_shared(text, other)
        place = text.rfind(opening, 0, num_shared) if opening else -1
        start = num_shared if place < 0 else place + len(opening)
        return _Turn(index=0, text=text, start=start, missing_prompt="")

    def _num_shared(self, text: str, other: str) -> int:
        """Returns the length of two texts' common prefix, cut before a special token that it would split."""
        num_common = _num_common(text, other)
        return min(self._token_start(each, num_common) for each in (text, other))

    def _token_start(self, text: str, place: int) -> int:
        """Returns the start of the special token around a place, or the place itself if no token is around it."""
        for token in self._template.special_tokens:
            start = text.find(token, max(0, place - len(token) + 1), place + len(token) - 1)
            if 0 <= start < place:
                return start
        return place

    def _end_within(self, conversation: Conversation, turn: _Turn, text: str) -> int | None:
        """Returns the end of a turn's part to learn in a longer text, None if the text does not begin with the turn.

        Some templates end each conversation with a token such as end-of-text. The longer text lacks it after the turn.
        """
        if text.startswith(turn.text):
            return self._end_of_turn(text, turn.start, len(turn.text))
        place = self._token_start(turn.text, _num_common(text, turn.text))
        body, closing = turn.text[:place], turn.text[place:]
        is_token = closing.strip() in self._template.special_tokens and body.rstrip().endswith(
            self._template.special_tokens
        )
        if not is_token or place <= turn.start:
            return None
        before = self._template.try_render(conversation.first(turn.index)) or ""
        return self._end_of_turn(text, turn.start, place) if before.endswith(closing) else None

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Returns the end of a turn without white space after its end-of-turn token, where generation stops."""
        kept = text[start:end].rstrip()
        return start + len(kept) if kept.endswith(self._template.special_tokens) else end


def _num_common(text: str, other: str) -> int:
    """Returns the length of two texts' common prefix."""
    low, high = 0, min(len(text), len(other))
    while low < high:  # bisects by slices, because a loop over characters takes seconds for long texts
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
