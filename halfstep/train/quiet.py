"""What other packages say while they are set up, about which a user of ``halfstep train`` can do nothing."""

from __future__ import annotations

import logging
import warnings

_LOGGERS = ("torchao", "torch.utils._pytree", "bitsandbytes", "DeepSpeed")


def quieten() -> None:
    """Only errors of theirs are shown from now on, and neither their bars nor what they plan to rename."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(logging.ERROR)  # for the loggers below it
        logger.addFilter(lambda record: record.levelno >= logging.ERROR)  # where it sets its own level at its import
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|trl|peft|accelerate")
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
