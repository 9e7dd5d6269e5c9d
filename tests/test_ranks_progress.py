"""The thread that posts where a rank is."""

import threading
import time

from torch import distributed

from halfstep.ranks import progress


class SlowStore:
    """Takes a while to answer, and notes whether it is being asked."""

    def __init__(self):
        self.is_asked, self.num_asked = False, 0

    def set(self, key, value):
        self.is_asked = True
        self.num_asked += 1
        time.sleep(0.05 * (self.num_asked > 1))
        self.is_asked = False


def test_nothing_is_inside_the_store_once_it_is_closed(monkeypatch):
    """A daemon thread that comes back from C++ into an interpreter that has ended calls std::terminate."""
    store = SlowStore()
    monkeypatch.setattr(progress, "_own", lambda store: store)
    posting = progress.Progress(store, 0, 1, beat_s=0.001)
    deadline = time.monotonic() + 20
    while not (store.is_asked and store.num_asked > 1) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert store.is_asked
    posting.close()
    assert not store.is_asked
    assert "halfstep progress" not in [thread.name for thread in threading.enumerate()]
    assert not distributed.is_initialized()
