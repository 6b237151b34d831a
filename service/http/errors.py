"""Error answers: every failure becomes the one JSON envelope."""

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from windlass.service.validation import ApiError, describe_value, hint, plain_reason
from windlass.storage.memory import is_out_of_space
from windlass.storage.sql import IllegalTransition, NotFound, StatusConflict, why_unavailable

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = 5
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

_HTTP_CODES = {
    HTTPStatus.NOT_FOUND: "unknown_url",
    HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
}


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Makes the answer to a failure. Illegal changes answer 400 and not 409, because clients retry after 409."""
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def error_body(error: ApiError) -> dict[str, Any]:
    """Makes the error envelope."""
    param = error.param and _encodable(error.param)
    body = {"message": _encodable(error.message), "type": error.kind, "param": param, "code": error.code}
    return {"error": body}


def _encodable(text: str) -> str:
    """Escapes lone surrogates, which a client's JSON may contain in parameter names but UTF-8 cannot encode."""
    return text.encode(errors="backslashreplace").decode()


def install_error_handlers(app: FastAPI) -> None:
    """Makes every failure answer with the envelope."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(NotFound, _on_not_found)
    app.add_exception_handler(IllegalTransition, _on_illegal_change)
    app.add_exception_handler(StatusConflict, _on_illegal_change)
    app.add_exception_handler(RequestValidationError, _on_invalid_request)
    app.add_exception_handler(HTTPException, _on_http_exception)
    for kind in (SQLAlchemyError, OSError):
        app.add_exception_handler(kind, _on_trouble)
    app.add_exception_handler(Exception, _on_unexpected)


def answer_to_trouble(error: Exception) -> JSONResponse | None:
    """Makes a 503 answer if the database is unavailable or a disk is full, so that clients retry.

    Returns None for other errors.
    """
    if (why := why_unavailable(error)) is not None:
        answer = ApiError(f"the service's database cannot be used: {why}", status=503, code="database_unavailable")
    elif is_out_of_space(error):
        answer = ApiError("a disk of the service is full", status=503, code="disk_full")
    else:
        return None
    _log.warning("%s: %s", answer.message, error)
    return error_response(answer, {"Retry-After": str(_RETRY_AFTER_S)})


def _on_trouble(_request: Request, error: Exception) -> JSONResponse:
    if (answer := answer_to_trouble(error)) is None:
        raise error
    return answer


def _on_api_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return error_response(error)


def _on_not_found(_request: Request, error: Exception) -> JSONResponse:
    return error_response(ApiError(str(error), status=404, code="not_found"))


def _on_illegal_change(_request: Request, error: Exception) -> JSONResponse:
    return error_response(ApiError(str(error), code="invalid_state"))


def _on_invalid_request(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]  # only the first error; the client's next request reports the next one
    field = getattr(request.scope.get("route"), "body_field", None)
    return error_response(_invalid_request(first, None if field is None else field.field_info.annotation))


def _invalid_request(detail: dict[str, Any], body: object) -> ApiError:
    """Makes the error for one of pydantic's findings. `body`: the type of the request's body."""
    kind, location = detail["type"], list(detail["loc"])
    if kind == "json_invalid":
        return ApiError(f"the body is not JSON: {detail['ctx']['error']}", code="invalid_json")
    if location and location[0] in ("body", "query", "path", "header"):
        location = location[1:]
    param = ".".join(str(part) for part in location) or None
    if kind == "extra_forbidden":
        text = f"unrecognized parameter: {param}{hint(body, location)}"
        return ApiError(text, param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(f"missing parameter: {param or 'the body'}", param=param, code="missing_parameter")
    value, where = detail.get("input"), f"{param}: " if param else ""
    # Of an object the reason names the fields.
    got = "" if isinstance(value, dict) else f", got {describe_value(value)}"
    return ApiError(f"{where}{plain_reason(detail)}{got}", param=param, code="invalid_value")


def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    headers = {name: value for name, value in (error.headers or {}).items() if name.lower() != "allow"}
    message, code = str(error.detail), _HTTP_CODES.get(HTTPStatus(error.status_code))
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"unknown URL: {request.method} {request.url.path}"
    elif isinstance(error.__cause__, (RecursionError, ValueError)):  # from Python's JSON parser
        message = (
            "the body cannot be read: it is not UTF-8, is nested too deeply, or has a number of thousands of digits"
        )
        code = "invalid_json"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{request.method} is not allowed on {request.url.path}"
        headers["Allow"] = ", ".join(_methods_of(request))
    return error_response(ApiError(message, status=error.status_code, code=code), headers)


def _methods_of(request: Request) -> list[str]:
    """Lists all methods of the path, because the route that refused the request knows only its own."""
    routes = request.app.router.routes
    found = [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    ]
    return found or ["GET", "HEAD"]  # a mounted static folder, which refuses other methods itself


def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises the error again for the server's log. The answer reveals no internals.
    _log.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    return error_response(ApiError("the service failed; its log says why", status=500, code="internal_error"))
