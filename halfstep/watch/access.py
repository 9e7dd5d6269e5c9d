"""Who may look at the page: its own browser window, and nobody through a foreign name, a foreign page or a guess.

A page on this machine can be reached by every other page that its user opens, so each request has to show three things:
that it came under a name of this server (or a foreign site has pointed its own name here), that it was not sent by
another site's page, and, once the server listens to more than this machine, that it knows the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

METHODS = ("GET", "HEAD")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::")

# Plotly puts style elements into the page, so styles may stand inline; scripts may not.
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Access:
    """ASGI middleware: refuses whoever may not look, with one line, and puts the page's rules on every answer.

    token: what a request has to know, or None. It is asked for once as ``?token=``, and goes on as a cookie, so that
           it stands in no address; programs send ``Authorization: Bearer``.
    hosts: names and addresses of this server, as a ``Host`` header may have them. Ports are not compared: a tunnel has
           its own. With "0.0.0.0" or "::" among them every address is the server's, since only a name can be pointed
           elsewhere.
    """

    def __init__(self, app: ASGIApp, token: str | None, hosts: Sequence[str]) -> None:
        self._app, self._token = app, token
        self._hosts = {host.lower() for host in (*LOOPBACK, *hosts)}
        self._takes_addresses = any(host in EVERY_ADDRESS for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_rules(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                rules = {"cache-control": "no-store", **_HEADERS}
                added = [(name.encode(), rule.encode()) for name, rule in rules.items() if name.encode() not in given]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        headers = _Headers(scope)
        refusal = self._refusal(scope, headers)
        query = dict(parse_qsl(scope["query_string"].decode("latin-1")))
        if refusal:
            await _answer(send_with_rules, *refusal)
        elif self._token is None:
            await self._app(scope, receive, send_with_rules)
        elif "token" in query and self._knows(query["token"]):
            await self._welcome(scope, send_with_rules)
        elif any(map(self._knows, self._tokens(scope, headers))):
            await self._app(scope, receive, send_with_rules)
        else:
            line = "The token is missing or wrong. Open the whole address that halfstep watch printed."
            await _answer(send_with_rules, 401, line, {"www-authenticate": "Bearer"})

    def _refusal(self, scope: Scope, headers: _Headers) -> tuple[int, str, dict[str, str]] | None:
        """Status, line and headers of the answer to a request that does not come from this server's own page."""
        hosts = headers.all("host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return 421, "This server has no such name. Name it with: halfstep watch RUNS_DIR --host NAME", {}
        origins = headers.all("origin")
        if any(origin.partition("://")[2] != hosts[0] for origin in origins):
            return 403, "Pages of other sites may not read this one.", {}
        # Following a link is fine: the other site sees nothing of what it opens.
        is_link = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
        if headers.get("sec-fetch-site") not in (None, "none", "same-origin") and not is_link:
            return 403, "Pages of other sites may not read this one.", {}
        if scope["method"] not in METHODS:
            return 405, "This server only shows: it takes GET and HEAD.", {"allow": ", ".join(METHODS)}
        return None

    def _is_ours(self, host: str) -> bool:
        name = host_name(host)
        return name in self._hosts or (self._takes_addresses and is_address(name))

    def _knows(self, token: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(token.encode(), self._token.encode())

    def _tokens(self, scope: Scope, headers: _Headers) -> list[str]:
        kind, _, bearer = (headers.get("authorization") or "").partition(" ")
        # By hand: http.cookies gives up at the first cookie of another server on this machine that it cannot read.
        cookies = [text.strip().partition("=") for text in ";".join(headers.all("cookie")).split(";")]
        name = _cookie_name(scope)
        return [bearer.strip()] * (kind.lower() == "bearer") + [value for key, _, value in cookies if key == name]

    async def _welcome(self, scope: Scope, send: Send) -> None:
        """Keep the token as a cookie, and go to the same address without it."""
        pairs = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        query = urlencode([(name, value) for name, value in pairs if name != "token"])
        # One slash: //name would be another server.
        path = "/" + quote(scope["path"].lstrip("/"))
        cookie = f"{_cookie_name(scope)}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        where = f"{path}?{query}" if query else path
        await _answer(send, 303, "The token is kept.", {"location": where, "set-cookie": cookie})


class _Headers:
    def __init__(self, scope: Scope) -> None:
        self._pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self._pairs if key == name]

    def get(self, name: str) -> str | None:
        return next(iter(self.all(name)), None)


def host_name(host: str) -> str:
    """The name or address in a ``Host`` header, without its port and brackets; "" when it is neither."""
    name, bracket, rest = host.lower().rpartition("]")
    if bracket:
        return name[1:] if name.startswith("[") and (not rest or rest[0] == ":") else ""
    name, _, port = host.lower().partition(":")
    return name if not port or port.isdecimal() else ""


def is_address(name: str) -> bool:
    """Whether ``name`` is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _cookie_name(scope: Scope) -> str:
    # A browser sends the cookies of every port of a machine, so two servers need two names.
    server = scope.get("server")
    return f"halfstep-{server[1]}" if server else "halfstep"


async def _answer(send: Send, status: int, line: str, headers: dict[str, str]) -> None:
    body = json.dumps({"error": line} if status >= 400 else {"note": line}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **headers}
    pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
