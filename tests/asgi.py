"""A client of an ASGI application in the same process, which sends a path as it stands, however odd it is."""

import asyncio
import json
from dataclasses import dataclass
from urllib.parse import unquote


@dataclass
class Answer:
    status: int
    headers: dict
    body: bytes

    def json(self):
        return json.loads(self.body, parse_constant=_no_json)


def _no_json(word):
    raise AssertionError(f"{word} is no JSON")


class Client:
    """With it, the application is started at the beginning of a block and stopped at its end."""

    def __init__(self, app, host="127.0.0.1:8000"):
        self.app, self.host = app, host

    def __enter__(self):
        self._runner = asyncio.Runner()
        self._lifespan = self.app.router.lifespan_context(self.app)
        self._runner.run(self._lifespan.__aenter__())
        return self

    def __exit__(self, *error):
        self._runner.run(self._lifespan.__aexit__(None, None, None))
        self._runner.close()

    def get(self, address, method="GET", **headers):
        """headers: by name with _ for -; one that is None is not sent, a list is sent several times."""
        return self._runner.run(self._get(address, method, headers))

    def get_all(self, addresses):
        """Asks for several at once."""

        async def ask():
            return await asyncio.gather(*(self._get(address, "GET", {}) for address in addresses))

        return self._runner.run(ask())

    async def _get(self, address, method, headers):
        path, _, query = address.partition("?")
        given = {"host": self.host, **{name.replace("_", "-"): value for name, value in headers.items()}}
        pairs = [
            (name.encode(), value.encode())
            for name, values in given.items()
            if values is not None
            for value in ([values] if isinstance(values, str) else values)
        ]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": pairs,
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8000),
        }
        sent = []

        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        await self.app(scope, receive, send)
        start, *rest = sent
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, b"".join(message.get("body", b"") for message in rest))
