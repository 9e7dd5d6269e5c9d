"""Where a message goes: a webhook, a command, or a service of apprise. No target ever shows a secret of its own.

A target is named by its kind and host, as they are written; a variable stands there by its name. What goes wrong is
told in words of ours, since a library's own words may hold the URL.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from halfstep.errors import HalfstepError

_VARIABLE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
_REASONS = {
    "unreachable": "it could not be reached",
    "slow": "it did not answer in time",
    "login": "it refused the name, password or token",
    "failed": "it did not take the message",
}


class NotSentError(Exception):
    """A message did not arrive: why, in one line without a secret."""


@dataclass(frozen=True)
class Message:
    """title, body: for people. facts: the same for programs, ready for JSON."""

    title: str
    body: str
    facts: Mapping[str, Any]


class Target(Protocol):
    """name: kind and host, for people. send: NotSentError if the message does not arrive within ``timeout_s``."""

    name: str

    def send(self, message: Message, timeout_s: float) -> None: ...


def target_of(text: str) -> Target:
    """The target that ``text`` describes, see halfstep.watch.settings.Watch; HalfstepError if it describes none."""
    kind, _, rest = text.partition(":")
    if kind == "command":
        # Split first, so that a variable is never more than a part of its word.
        return Command(_words(rest))
    name, filled = _name(text), _filled(text)
    if filled.startswith("webhook:"):
        return Webhook(name, filled.removeprefix("webhook:"))
    if "://" not in filled:
        raise _no_target(name, "it is no kind of target", "Write webhook:URL, command:WORDS or a URL of apprise.")
    return Apprise(name, filled)


class Webhook:
    """A POST of the facts as JSON. A redirect is not followed: it would drop the message, or take it elsewhere."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        try:
            parts = urllib.parse.urlsplit(url)
            is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_good = False
        if not is_good or not url.isascii() or re.search(r"[\x00-\x20\x7f]", url):
            raise _no_target(name, "it is no URL of http or https", "Write webhook:https://HOST/PATH, percent-encoded.")
        login, _, host = parts.netloc.rpartition("@")
        self._url = urllib.parse.urlunsplit((parts.scheme, host, parts.path or "/", parts.query, ""))
        self._headers = {"Content-Type": "application/json", "User-Agent": "halfstep"}
        if login:
            encoded = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
            self._headers["Authorization"] = f"Basic {encoded}"

    def send(self, message: Message, timeout_s: float) -> None:
        # debuglevel: a program may have told http.client to print what is sent.
        opener = urllib.request.build_opener(
            urllib.request.HTTPHandler(debuglevel=0), urllib.request.HTTPSHandler(debuglevel=0), _NoRedirect()
        )
        data = _json(message).encode()
        request = urllib.request.Request(self._url, data, self._headers, method="POST")
        try:
            opener.open(request, timeout=timeout_s).close()
        except urllib.error.HTTPError as error:
            error.close()
            raise NotSentError(f"it answered {error.code}") from None
        except (OSError, http.client.HTTPException) as error:
            raise NotSentError(_reason(error)) from None


class Command:
    """A program, run without a shell, with the facts as JSON on its input and as ``HALFSTEP_RULE`` and so on."""

    def __init__(self, words: Sequence[str]) -> None:
        self.name = f"command {Path(words[0]).name}"
        self._words = [_filled(word) for word in words]
        if shutil.which(self._words[0]) is None:
            raise _no_target(self.name, "there is no such program", "Name one on the PATH, or its whole path.")

    def send(self, message: Message, timeout_s: float) -> None:
        facts = {**message.facts, "title": message.title, "body": message.body}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}
        variables = {f"HALFSTEP_{key.upper()}": text.replace("\0", "") for key, text in texts.items()}
        # DEVNULL: what a command leaves running could hold a pipe open.
        status, _ = _run(self._words, _json(message), timeout_s, subprocess.DEVNULL, variables)
        if status:
            raise NotSentError(f"it ended with status {status}")


class Apprise:
    """A service of apprise, in a process of its own: no log of ours can hear it, and one that hangs can be ended."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self._url = name, url
        answer = self._ask({}, 60.0)
        if answer == "missing":
            raise HalfstepError(
                f"target {name}", "apprise is not installed", "Install it with: pip install 'halfstep[notify]'."
            )
        if answer != "known":
            raise _no_target(
                name, "apprise does not know such a URL", "See its list of services, or write webhook:URL."
            )

    def send(self, message: Message, timeout_s: float) -> None:
        order = {"title": message.title, "body": message.body, "severity": str(message.facts["severity"])}
        answer = self._ask(order, timeout_s)
        if answer != "sent":
            raise NotSentError(_REASONS.get(answer) or f"it answered {int(answer)}")

    def _ask(self, order: Mapping[str, str], timeout_s: float) -> str:
        words = [sys.executable, "-P", str(Path(__file__).with_name("apprise_process.py"))]
        try:
            status, answer = _run(words, json.dumps({"url": self._url, **order}), timeout_s, subprocess.PIPE, {})
        except NotSentError:
            return "slow"
        return "failed" if status else answer


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


def _run(
    words: Sequence[str], text: str, timeout_s: float, stdout: int, variables: Mapping[str, str]
) -> tuple[int, str]:
    """Exit status and output of a program that reads ``text``; NotSentError if it cannot start, or hangs.

    It has a session of its own: a Ctrl-C that ends the training does not end the message about it.
    """
    try:
        process = subprocess.Popen(
            words,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise NotSentError(_reason(error)) from None
    try:
        output, _ = process.communicate(text, timeout_s)
    except subprocess.TimeoutExpired:
        raise NotSentError("it did not end in time") from None
    finally:
        if process.returncode is None:  # so that its number is still its own
            _end(process)
    return process.returncode, (output or "").strip()


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it with all that it has started. One that cannot be killed, as of another user, is not waited for."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
    with suppress(OSError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(1.0)


def _json(message: Message) -> str:
    return json.dumps(message.facts, allow_nan=False)


def _reason(error: BaseException) -> str:
    """What went wrong, without anything that the library took from the URL."""
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
        return _reason(error.reason)
    if isinstance(error, TimeoutError):
        return _REASONS["slow"]
    if isinstance(error, ssl.SSLError):
        return f"no safe connection ({error.reason})"
    text = error.strerror if isinstance(error, OSError) else None
    return f"{_REASONS['unreachable']} ({text or type(error).__name__})"


def _words(text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    if not words:
        raise _no_target("command", "it has no words, or a quote is left open", "Write command:PROGRAM ARGUMENTS.")
    return words


def _filled(text: str) -> str:
    """``text`` with the variables' values; ``$$`` is a dollar."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        name = match[2] or match[3]
        if not os.environ.get(name):
            raise HalfstepError(
                f"environment variable {name}", "a target of alerts needs it, and it is not set", f"Set {name}."
            )
        return os.environ[name]

    return _VARIABLE.sub(value, text)


def _name(text: str) -> str:
    """How a target is called: its kind, and the host of a webhook. Of apprise a host may be a token."""
    kind, _, rest = text.partition(":")
    if variable := _VARIABLE.match(text):
        return variable[0]
    if kind == "webhook":
        if variable := _VARIABLE.match(rest):
            return f"webhook {variable[0]}"
        try:
            parts = urllib.parse.urlsplit(rest)
            return f"webhook {parts.hostname}" if parts.scheme in ("http", "https") and parts.hostname else "webhook"
        except ValueError:
            return "webhook"
    return kind if rest.startswith("//") and kind.isalnum() else "of alerts"


def _no_target(name: str, why: str, fix: str) -> HalfstepError:
    return HalfstepError(f"target {name}", why, fix)
