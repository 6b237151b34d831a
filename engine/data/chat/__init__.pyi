"""Renders conversations by a model's chat template, checks them, and marks the characters to learn."""

from windlass.engine.data.chat.conversation import ChatRenderer as ChatRenderer
from windlass.engine.data.chat.conversation import ChatTemplateError as ChatTemplateError
from windlass.engine.data.chat.conversation import RenderedText as RenderedText
