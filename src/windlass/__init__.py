"""Full-parameter fine-tuning of models far larger than the GPU, on boxes people own."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass.actors.offload import offload as offload
    from windlass.engine.wrapped_errors import CannotOffloadError as CannotOffloadError
    from windlass.engine.wrapped_errors import OffloadClosedError as OffloadClosedError
    from windlass.engine.wrapped_errors import OffloadError as OffloadError
    from windlass.engine.wrapped_errors import OffloadFailedError as OffloadFailedError
    from windlass.engine.wrapped_errors import OffloadMisuseError as OffloadMisuseError
    from windlass.engine.wrapped_errors import ParamsAwayError as ParamsAwayError

__version__ = "0.1.0"

_ERRORS = {
    "CannotOffloadError",
    "OffloadClosedError",
    "OffloadError",
    "OffloadFailedError",
    "OffloadMisuseError",
    "ParamsAwayError",
}


def __getattr__(name: str) -> Any:
    """The Python API, imported when it is first used: most of windlass's processes need no torch."""
    if name == "offload":
        from windlass.actors.offload import offload

        return offload
    if name in _ERRORS:
        from windlass.engine import wrapped_errors

        return getattr(wrapped_errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
