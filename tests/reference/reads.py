"""What makes the host wait for a CUDA device, counted on a CPU."""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITING = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "allclose"}
WAITING_METHODS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}


class _Methods(TorchFunctionMode):
    """On a CPU ``tolist`` and ``numpy`` read memory directly and never reach the dispatcher."""

    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.reads.num_reads += func in WAITING_METHODS
        return func(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """Counts reads to the host."""

    def __init__(self):
        super().__init__()
        self.num_reads = 0
        self._methods = _Methods(self)

    def __enter__(self):
        self._methods.__enter__()
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self._methods.__exit__(*exception)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.see(func.name().removeprefix("aten::").partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def see(self, name, args):
        self.num_reads += name in WAITING
