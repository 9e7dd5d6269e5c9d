"""A headless Chromium, for tests of pages; they skip where there is none, unless HALFSTEP_NEEDS_BROWSER is set.

Pages forbid eval, which wait_for_function() of Playwright needs: tests wait with expect(), or with until().
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
LONGEST_S = 15.0


@pytest.fixture(scope="module")
def chromium():
    """A browser for a whole file: that of $CHROMIUM, one of this machine, or Playwright's own."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _without("playwright is not installed")
    with sync_playwright() as playwright:
        named = os.environ.get("CHROMIUM")
        found = named or next(filter(None, map(shutil.which, NAMES)), None) or playwright.chromium.executable_path
        if shutil.which(found) is None and not Path(found).is_file():
            _without(f"there is no {named}" if named else f"there is none of {', '.join(NAMES)}, nor Playwright's own")
        browser = playwright.chromium.launch(executable_path=found, args=FLAGS)
        yield browser
        browser.close()


def until(holds, what):
    """Wait until ``holds()`` is true, and give what it gave."""
    deadline = time.monotonic() + LONGEST_S
    while not (found := holds()):
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)
    return found


def _without(why):
    why = f"needs a Chromium: {why}"
    if os.environ.get("HALFSTEP_NEEDS_BROWSER"):
        pytest.fail(why)
    pytest.skip(why)
