"""The asynchronous `openai` client with the interface of the synchronous one, so that both run the same tests."""

import asyncio
import inspect
from collections.abc import Iterator
from typing import Any

from openai import AsyncOpenAI
from openai._resource import AsyncAPIResource


class Waiting:
    """Awaits each call, and reads each list to its end by the client's own paging."""

    def __init__(self, target: Any, runner: asyncio.Runner) -> None:
        self._target = target
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return self._wrapped(getattr(self._target, name))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        found = self._target(*arguments, **named)
        if inspect.isawaitable(found):

            async def wait() -> Any:
                return await found

            found = self._runner.run(wait())
        return self._wrapped(found)

    def __iter__(self) -> Iterator[Any]:
        items = aiter(self._target)

        async def following() -> Any:
            return await anext(items, None)

        while (item := self._runner.run(following())) is not None:
            yield item

    def _wrapped(self, found: Any) -> Any:
        waits = inspect.isroutine(found) or hasattr(found, "__aiter__")
        return Waiting(found, self._runner) if waits or isinstance(found, AsyncAPIResource | AsyncOpenAI) else found
