"""Sends one message over apprise, as a process of its own; halfstep.watch.targets runs this file.

In: one JSON object with ``url``, and to send something ``title``, ``body`` and ``severity``. Out: one word, or an HTTP
status. What apprise logs may hold the URL, so that it ends here.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys

SIGNS = {
    "unreachable": ("refused", "unreachable", "not known", "resol", "no route"),
    "slow": ("timed out", "timeout"),
    "login": ("authentication", "unauthorized", "credentials", "(535"),
}
"""What a log of apprise says of a fault, in small letters, and our word for it."""


def answer(order: dict[str, str]) -> str:
    """missing, known, sent, an HTTP status, failed, or a key of SIGNS."""
    log = io.StringIO()
    logging.basicConfig(stream=log, level=logging.DEBUG, force=True)
    try:
        import apprise
    except ImportError:
        return "missing"
    services = apprise.Apprise()
    if not services.add(order["url"]):
        return "unknown"
    if "body" not in order:
        return "known"
    kinds = {"error": apprise.NotifyType.FAILURE, "warning": apprise.NotifyType.WARNING}
    kind = kinds.get(order["severity"], apprise.NotifyType.INFO)
    if services.notify(order["body"], order["title"], kind, body_format=apprise.NotifyFormat.TEXT):
        return "sent"
    told = log.getvalue().lower()
    if status := re.search(r"error=(\d{3})\b", told):
        return status[1]
    return next((word for word, signs in SIGNS.items() if any(sign in told for sign in signs)), "failed")


if __name__ == "__main__":
    print(answer(json.load(sys.stdin)))
