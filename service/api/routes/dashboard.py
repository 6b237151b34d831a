"""The dashboard's page and its assets, all served from this machine."""

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, HTTPException, Request
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles
from fastapi.templating import Jinja2Templates

import windlass
from windlass.planner.question import choices_in_words
from windlass.service.api import CallerDep
from windlass.service.api.schemas import plan_limits
from windlass.storage.sql.repositories import Role

_WEB_DIR = Path(windlass.__file__).parent / "web"

router = APIRouter()
_templates = Jinja2Templates(directory=_WEB_DIR / "templates")


@router.get("/", include_in_schema=False)
def show_dashboard(request: Request, caller: CallerDep) -> Response:
    """Shows the dashboard. Answers 404 in an installation without one."""
    return render(
        request,
        "index.html",
        user=caller.user,
        has_login=caller.login is not None,
        is_admin=caller.role is Role.ADMIN,
        plan_limits=plan_limits(),
        plan_choices={device: _choices(is_cpu=device == "cpu") for device in ("cpu", "gpu")},
    )


@router.get("/docs", include_in_schema=False)
def show_api(request: Request, caller: CallerDep) -> Response:
    """Lists the endpoints, one line each, with a link to the whole description."""
    found = [
        (method.upper(), path, operation.get("description", ""))
        for path, operations in request.app.openapi()["paths"].items()
        for method, operation in operations.items()
    ]
    return render(request, "api.html", user=caller.user, has_login=caller.login is not None, operations=found)


def _choices(*, is_cpu: bool) -> dict[str, dict[str, str]]:
    return {name: asdict(words) for name, words in choices_in_words(is_cpu=is_cpu).items()}


def render(request: Request, page: str, *, status_code: int = 200, **values: Any) -> Response:
    """Renders a page for this caller and forbids caches to keep it.

    Raises HTTPException 404 in an installation without pages.
    """
    if not (_WEB_DIR / "templates" / page).is_file():
        raise HTTPException(404)
    headers = {"Cache-Control": "no-store"}
    return _templates.TemplateResponse(request, page, values, status_code=status_code, headers=headers)


@router.get("/static/vendor/plotly.min.js", include_in_schema=False)
def plotly_script() -> FileResponse:
    """Serves the charting library from the installed `plotly` package."""
    spec = importlib.util.find_spec("plotly")
    assert spec is not None, "plotly is a dependency"
    assert spec.origin is not None, "plotly is a package"
    return FileResponse(Path(spec.origin).parent / "package_data" / "plotly.min.js", media_type="text/javascript")


class _Assets(StaticFiles):
    """Static files that a browser revalidates at each use, so that no page runs an older release's script."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


def install_dashboard(app: FastAPI) -> None:
    """Adds the dashboard's page and its assets."""
    app.include_router(router)
    app.mount("/static", _Assets(directory=_WEB_DIR / "static", check_dir=False), name="static")
