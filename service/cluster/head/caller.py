"""Stub."""

from typing import Annotated

from fastapi import Depends, Request

from windlass.storage.sql import Box


def calling_box(request: Request) -> Box:
    """Returns the calling box."""
    raise NotImplementedError


BoxDep = Annotated[Box, Depends(calling_box)]
