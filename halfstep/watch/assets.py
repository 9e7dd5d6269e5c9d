"""The files that a page is made of: those of ``halfstep/watch/static``, and plotly.js from its Python package."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import PurePath

from plotly.offline import get_plotlyjs

# Not from the system's list of types, which may have others: a browser runs no script of another type.
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".html": "text/html; charset=utf-8",
}
# A file may name those of the kinds before its own.
_ORDER = (".svg", ".css", ".js", ".html")


@dataclass(frozen=True)
class Asset:
    """A file as it is sent. tag: stands for its content."""

    content: bytes
    media_type: str

    @cached_property
    def tag(self) -> str:
        return hashlib.blake2b(self.content, digest_size=8).hexdigest()

    @cached_property
    def compressed(self) -> bytes:
        return gzip.compress(self.content, compresslevel=6, mtime=0)


@cache
def assets() -> Mapping[str, Asset]:
    """Every asset by its name. Where one names another, the tag stands in the address, so that it may be kept long."""
    found = {"plotly.js": Asset(get_plotlyjs().encode(), _TYPES[".js"])}
    sources = {file.name: file.read_text("utf-8") for file in files("halfstep.watch").joinpath("static").iterdir()}
    for name in sorted(sources, key=lambda name: (_ORDER.index(PurePath(name).suffix), name)):
        text = sources[name]
        for other, asset in found.items():
            text = text.replace(f'"/static/{other}"', f'"/static/{other}?v={asset.tag}"')
        found[name] = Asset(text.encode(), _TYPES[PurePath(name).suffix])
    return found
