"""torch's fused encoder layers, kept from running in a 16-bit region on a CPU.

``nn.TransformerEncoder`` and ``nn.MultiheadAttention`` have a path for inference that reads all weights of a layer at
once, past autocast's lists. It gives way to CUDA's autocast alone.
"""

from __future__ import annotations

import threading

import torch


class _NoFastPath:
    """While it is open the layers run as they are written. The switch is the process's; the last user puts it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._saved = True

    def __enter__(self) -> None:
        with self._lock:
            if self._num_users == 0:
                self._saved = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._num_users += 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                torch.backends.mha.set_fastpath_enabled(self._saved)


no_fast_path = _NoFastPath()
