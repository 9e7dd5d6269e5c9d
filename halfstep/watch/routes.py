"""What each address answers: the page, its JSON twins, the files that it is made of, and the metrics."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from halfstep.errors import HalfstepError
from halfstep.watch.access import METHODS, Access
from halfstep.watch.api import Api, Json, View
from halfstep.watch.assets import assets
from halfstep.watch.exporters.prometheus import metrics_text
from halfstep.watch.metrics import METRICS
from halfstep.watch.shelf import Busy, Gone

POINTS = (10, 5000)
MOST_RUNS = 20

logger = logging.getLogger("halfstep")


def routes_of(api: Api, token: str | None, hosts: Sequence[str]) -> Starlette:
    """The application over ``api``, which it closes at its end. Every answer is made in a worker thread."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(api.close)

    def page(_: Request) -> Response:
        return _page(200)

    def runs(request: Request) -> Response:
        return _json(request, api.runs(_seen(request)))

    def run(request: Request) -> Response:
        # What ends with .json is data, whatever runs there are. The page of a run whose name does has a / at its end.
        name: str = request.path_params["name"]
        if not name.endswith(".json"):
            return _page(200 if api.has(name.removesuffix("/")) else 404)
        name = name.removesuffix(".json").removesuffix("/")
        return _json(request, api.run(name, _number(request, "rank", 0), _view(request), _seen(request)))

    def compare(request: Request) -> Response:
        names = list(dict.fromkeys(request.query_params.getlist("run")[: MOST_RUNS + 1]))
        if not 1 <= len(names) <= MOST_RUNS:
            raise HalfstepError(f"{len(names)} runs", f"1 to {MOST_RUNS} are compared", "Write run=NAME for each.")
        metric = _word(request, "metric") or "loss"
        if metric not in METRICS:
            raise HalfstepError(f"metric={metric}", "there is no such metric", f"Use {', '.join(METRICS)}.")
        return _json(request, api.compare(names, metric, _view(request), _seen(request)))

    def metrics(_: Request) -> Response:
        found = api.runs()
        assert found is not None
        try:
            return Response(metrics_text(found["runs"]), media_type="text/plain; version=0.0.4")
        except HalfstepError as error:  # its package is missing
            return _error(501, str(error))

    def static(request: Request) -> Response:
        return _asset(request, request.path_params["name"])

    paths: dict[str, Callable[[Request], Response]] = {
        "/": page,
        "/compare": page,
        "/runs.json": runs,
        "/compare.json": compare,
        "/run/{name:path}": run,
        "/metrics": metrics,
        "/static/{name}": static,
    }
    app = Starlette(
        routes=[Route(path, endpoint, methods=METHODS) for path, endpoint in paths.items()],
        middleware=[Middleware(Access, token=token, hosts=hosts)],
        exception_handlers={
            Gone: lambda _, error: _error(404, str(error)),
            Busy: lambda _, error: _error(503, str(error)),
            HalfstepError: lambda _, error: _error(400, str(error)),
            HTTPException: lambda _, error: _error(error.status_code, "There is nothing at this address."),
            Exception: _failed,
        },
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    return app


def _page(status: int) -> Response:
    asset = assets()["page.html"]
    return Response(asset.content, status, media_type=asset.media_type)


def _asset(request: Request, name: str) -> Response:
    asset = assets().get(name)
    if asset is None:
        raise HTTPException(404)
    is_named = request.query_params.get("v") == asset.tag
    headers = {
        "cache-control": "private, max-age=31536000, immutable" if is_named else "private, no-cache",
        "etag": f'"{asset.tag}"',
        "vary": "accept-encoding",
    }
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(asset.compressed, media_type=asset.media_type, headers={**headers, "content-encoding": "gzip"})
    return Response(asset.content, media_type=asset.media_type, headers=headers)


def _json(request: Request, content: Json | None) -> Response:
    """``content`` with its version as its ETag; None is what the page has already."""
    if content is None:
        return Response(status_code=304, headers={"etag": f'"{_seen(request)}"'})
    return Response(
        json.dumps(content, allow_nan=False, separators=(",", ":")),
        media_type="application/json",
        headers={"etag": f'"{content["version"]}"'},
    )


def _error(status: int, line: str) -> Response:
    return Response(json.dumps({"error": line}), status, media_type="application/json")


async def _failed(request: Request, error: Exception) -> Response:
    # Without the query, which may hold the token.
    logger.error("halfstep watch failed at %r", request.scope["path"], exc_info=error)
    return _error(500, "halfstep watch failed here; the terminal that it runs in says how.")


def _word(request: Request, name: str) -> str | None:
    """A parameter of the address; an empty one is none."""
    words = request.query_params.getlist(name)
    if len(words) > 1:
        raise HalfstepError(f"{name}", f"it stands {len(words)} times in the address", "Give it once.")
    return words[0] if words and words[0] else None


def _number(request: Request, name: str, least: int | None = None, most: int | None = None) -> int | None:
    word = _word(request, name)
    if word is None:
        return None
    number = int(word) if re.fullmatch(r"-?[0-9]{1,15}", word) else None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        limits = "a whole number" + (f" from {least}" if least is not None else "") + (f" to {most}" if most else "")
        raise HalfstepError(f"{name}={word[:40]}", f"it is {limits}", "Change the address.")
    return number


def _view(request: Request) -> View:
    first, last = _number(request, "first"), _number(request, "last")
    if first is not None and last is not None and first > last:
        raise HalfstepError(f"first={first}, last={last}", "the first step comes after the last", "Swap them.")
    points = _number(request, "points", *POINTS)
    return View(first, last) if points is None else View(first, last, points)


def _seen(request: Request) -> int | None:
    """The version that the page has: ``version=`` in the address, or the ETag of the answer before."""
    tag = request.headers.get("if-none-match", "").removeprefix("W/").strip('"')
    return int(tag) if re.fullmatch(r"[0-9]{1,15}", tag) else _number(request, "version", 0)
