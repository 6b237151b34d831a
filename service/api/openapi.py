"""The description at `/openapi.json`: what FastAPI derives, with the errors that the service really answers with."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from windlass.service.api.access import OPEN_PATHS

_REF = "#/components/schemas/"
_FASTAPIS_OWN = ("HTTPValidationError", "ValidationError")
_KEY = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key, `wk-…`. Requests of the service's own machine need none until somebody has made one.",
}


class ErrorDetail(BaseModel):
    """What went wrong, in words, and what of the request it was about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    """Every failure's answer."""

    error: ErrorDetail


def install_openapi(app: FastAPI) -> None:
    """Describe every failure by the one envelope: wrong requests answer 400 and others, never FastAPI's 422.

    And that a key is needed, but for the paths that are open to all.
    """

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _with_errors(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return app.openapi_schema

    app.openapi = describe  # type: ignore[method-assign]


def _with_errors(schema: dict[str, Any]) -> dict[str, Any]:
    envelope = ErrorEnvelope.model_json_schema(ref_template=f"{_REF}{{model}}")
    schemas = schema["components"]["schemas"]
    for name in _FASTAPIS_OWN:
        schemas.pop(name, None)
    schemas |= envelope.pop("$defs")
    schemas["ErrorEnvelope"] = envelope
    failure = {
        "description": "What went wrong",
        "content": {"application/json": {"schema": {"$ref": f"{_REF}ErrorEnvelope"}}},
    }
    schema["components"]["securitySchemes"] = {"key": _KEY}
    schema["security"] = [{"key": []}]
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            operation["responses"]["default"] = failure
            if path in OPEN_PATHS:
                operation["security"] = []
    return schema
