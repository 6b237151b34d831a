"""The conversation of the boxes with the first one: its requests to another box, and the failures of that one."""

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from windlass.actors.runtime.boxes.box_link import BoxLink
from windlass.actors.scheduler import ActorLostError
from windlass.storage.ids import Attempt, BoxName
from windlass.storage.integrity import StoreError
from windlass.storage.memory import may_find_room_later

_TICK_S = 1.0  # between two looks at the processes of a box

_End = TypeVar("_End")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxFailed:
    """A box cannot go on with its part."""

    message: str
    code: str
    param: str | None
    was_lost: bool  # another attempt may succeed


class BoxFailedError(ValueError):
    """Another box of the job cannot do its part. `code` and `param` are those of its error."""

    def __init__(self, message: str, code: str, param: str | None) -> None:
        super().__init__(message)
        self.code, self.param = code, param


class _FirstBoxLostError(ActorLostError):
    """The first box of the job is lost."""


class _EndedAtWorkError(Exception):
    """The first box has ended the attempt while this one carries out something."""


def require_no_failure(box: BoxName, told: object, *, is_running: bool = False) -> None:
    """Raises the error of another box that is lost or has failed. Other requests pass.

    `is_running`: the attempt has begun, so a failure is a loss.
    """
    if isinstance(told, ConnectionError):
        raise ActorLostError(str(told)) from told
    if isinstance(told, BoxFailed):
        text = f"box {box!r}: {told.message}"
        if told.was_lost or is_running:
            raise ActorLostError(text)
        raise BoxFailedError(text, told.code, told.param)


class FirstBox(Generic[_End]):
    """The requests of the first box, as another one gets them. One thread."""

    def __init__(self, link: BoxLink, ended: type[_End]) -> None:
        """`ended`: the type of the request that ends the attempt."""
        self.end: _End | None = None  # that request, once it is here
        self._link = link
        self._ended = ended
        self._early: deque[Any] = deque()  # that came during a call

    def work_until_end(self, work: Callable[[], _End], attempt: Attempt) -> _End:
        """Does a box's work in an attempt, and returns the request that ends it.

        `work` returns that request, or raises the error of `check_end`. Other errors of it are told to the first box,
        and raised here when that has ended the attempt, or is lost.
        """
        try:
            self.end = work()
        except _EndedAtWorkError:
            assert self.end is not None, "`check_end` has set it"
        except BaseException as error:
            self.tell(_failure_of(error, attempt))
            if not isinstance(error, _FirstBoxLostError | KeyboardInterrupt):
                self._await_end()
            raise
        return self.end

    def next_request(self, check: Callable[[], None]) -> Any:
        """Waits for a request. Raises ActorLostError if a box is lost, and the errors of `check`."""
        while True:
            if self._early:
                return self._early.popleft()
            try:
                sender, request = self._link.requests.get(timeout=_TICK_S)
            except queue.Empty:
                check()
                continue
            return _accepted(sender, request)

    def check_end(self) -> None:
        """Raises an error for `work` if the first box has ended the attempt, and ActorLostError if a box is lost."""
        while not self._link.requests.empty():
            request = _accepted(*self._link.requests.get())
            if isinstance(request, self._ended):
                self.end = request
                raise _EndedAtWorkError
            self._early.append(request)

    def tell(self, request: object) -> None:
        """Sends a request to the first box. If that is lost, or has ended the attempt, the next request says so."""
        with contextlib.suppress(ConnectionError):
            self._link.request(0, request)

    def _await_end(self) -> None:
        """Waits until the first box has ended the attempt, or is lost. It may start later than this box has failed."""
        while True:
            try:
                request = self.next_request(lambda: None)
            except _FirstBoxLostError:
                return
            except (ActorLostError, ValueError):
                continue  # the first box has one reason already
            if isinstance(request, self._ended):
                self.end = request
                return


def _accepted(sender: int, request: Any) -> Any:
    """Returns a request of the first box. Raises ActorLostError if it is the loss of a box."""
    if isinstance(request, ConnectionError):
        lost = ActorLostError if sender else _FirstBoxLostError
        raise lost(str(request)) from request
    if sender:
        raise ValueError(f"box {sender} sent {request}, and only the first box may")
    return request


def _failure_of(error: BaseException, attempt: Attempt) -> BoxFailed:
    was_lost = isinstance(error, ActorLostError | TimeoutError) or may_find_room_later(error, attempt)
    is_for_users = was_lost or isinstance(error, ValueError | OSError | StoreError)
    message = str(error) if is_for_users else f"{type(error).__name__}: {error}"
    code, param = getattr(error, "code", "start_failed"), getattr(error, "param", None)
    return BoxFailed(message=message, code=code, param=param, was_lost=was_lost)
