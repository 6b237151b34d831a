"""Conversations: rendered by a model's chat template, checked, and marked with what is learned."""

from windlass.engine.data.chat.conversation import ChatRenderer as ChatRenderer
from windlass.engine.data.chat.conversation import ChatTemplateError as ChatTemplateError
from windlass.engine.data.chat.conversation import RenderedText as RenderedText
