"""The description at `/openapi.json`: FastAPI's own, with the error answers that the service really sends."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from windlass.service.api.authentication import OPEN_PATHS

_REF = "#/components/schemas/"
_FASTAPIS_OWN = ("HTTPValidationError", "ValidationError")
_KEY = {
    "type": "http",
    "scheme": "bearer",
    "description": "An API key, `wk-…`. Requests of the service's own machine need none until the first key is made.",
}


class ErrorDetail(BaseModel):
    """The error in words, and the parameter of the request that caused it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(BaseModel):
    """The answer to every failed request."""

    error: ErrorDetail


def install_openapi(app: FastAPI) -> None:
    """Describes every failure by the one error envelope, and the API key that all but the open paths need.

    The service answers a wrong request with 400, never with FastAPI's 422.
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
        "description": "The error",
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
