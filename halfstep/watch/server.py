"""``halfstep watch RUNS_DIR``: the pages of a folder of runs, on an address of this machine."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep.errors import HalfstepError
from halfstep.watch.access import EVERY_ADDRESS
from halfstep.watch.api import Api
from halfstep.watch.golden import read_band

if TYPE_CHECKING:
    from starlette.applications import Starlette

MOST_CONNECTIONS = 500
_TOKEN = re.compile(r"[A-Za-z0-9_.~-]{16,200}")


def make_app(
    folder: str | os.PathLike[str], *, token: str | None, hosts: Sequence[str], golden: Sequence[str] = ()
) -> Starlette:
    """The application; halfstep.watch.access says what ``token`` and ``hosts`` do.

    golden: folders of the runs whose band is drawn beside the loss.
    HalfstepError when ``folder`` is none, a golden run has no log, or a package of the extra ``watch`` is missing.
    """
    try:
        from halfstep.watch.routes import routes_of
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    path = Path(folder)
    if not path.is_dir():
        why = "it is not a folder" if path.exists() else "there is no such folder"
        raise HalfstepError(f"RUNS_DIR {folder}", why, 'Name the folder that holds the runs: of log="runs/NAME", runs.')
    band = read_band(golden) if golden else None
    return routes_of(Api(path.resolve(), band), token, hosts)


def serve(
    folder: str | os.PathLike[str],
    host: str,
    port: int,
    token: str | None,
    golden: Sequence[str],
    on_ready: Callable[[str], None],
) -> None:
    """Serve the pages of ``folder`` until Ctrl-C, and end cleanly then.

    host:     127.0.0.1, or another address or name of this machine; then a token is needed, and made if None is given.
    port:     0 for a free one. on_ready: called with the address to open, token included, once it answers.
    HalfstepError as in :func:`make_app`, and when nobody can listen at ``host`` and ``port``.
    """
    if token is not None and not _TOKEN.fullmatch(token):
        fix = "Use 16 to 200 letters, digits, and - _ . ~, or leave it out to have one made."
        raise HalfstepError(
            "the token (HALFSTEP_WATCH_TOKEN)",
            "it is too short, too long, or has a sign that an address cannot hold",
            fix,
        )
    try:
        import uvicorn
    except ModuleNotFoundError as error:
        raise _missing(error) from None
    with _listen(host, port) as listener:
        address, port = listener.getsockname()[:2]
        if token is None and _needs_token(listener):
            token = secrets.token_urlsafe(32)
        name = socket.gethostname() if address in EVERY_ADDRESS else host.strip("[]")
        app = make_app(folder, token=token, hosts=[name, address], golden=golden)
        # Its own log would print to the terminal, and addresses with tokens in them.
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="critical",
            access_log=False,
            server_header=False,
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=0,
        )
        try:
            on_ready(_address(name, port, token))
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:
            pass  # uvicorn has closed everything, and raises it again


def _listen(host: str, port: int) -> socket.socket:
    fix = "Name one from 1024 to 65535 that no program listens at, or 0 to have a free one chosen."
    if not 0 <= port <= 65535:
        raise HalfstepError(f"--port {port}", "there is no such port", fix)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError):
        raise HalfstepError(f"--host {host}", "nothing has this name", "Name an address of this machine.") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            why = "this machine has no such address"
            raise HalfstepError(f"--host {host}", why, "Name an address of this machine.") from None
        why = "another program listens there" if error.errno == errno.EADDRINUSE else str(error.strerror)
        raise HalfstepError(f"--port {port}", why, fix) from None
    return listener


def _needs_token(listener: socket.socket) -> bool:
    """Whether other machines reach it."""
    return not ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


def _address(host: str, port: int, token: str | None) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def _missing(error: ModuleNotFoundError) -> HalfstepError:
    return HalfstepError(
        "halfstep watch", f"{error.name} is not installed", "Install it with: pip install 'halfstep[watch]'."
    )
