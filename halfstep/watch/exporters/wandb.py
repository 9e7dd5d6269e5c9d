"""The log as a run of Weights & Biases, by the package ``wandb``."""

from __future__ import annotations

import logging

from halfstep.errors import HalfstepError
from halfstep.watch.entry import Entry
from halfstep.watch.exporters.fact import Facts, describe
from halfstep.watch.exporters.package import load

logger = logging.getLogger("halfstep")
_LEVELS = {"note": "INFO", "warning": "WARN", "error": "ERROR"}
_TITLE_LENGTH = 63
_OLDEST = (0, 31)


class WeightsAndBiases:
    """Writes into a run of its own in ``project``, named and grouped by ``run``; wandb's own settings hold.

    The x axis is ``step``, so that steps which a resumed run computes again are kept: wandb's own axis must grow.
    HalfstepError when it is online and nobody is logged in: a run that trains never asks for a key.
    """

    def __init__(self, project: str, run: str) -> None:
        wandb = load("wandb", "wandb")
        if tuple(map(int, wandb.__version__.split(".")[:2])) < _OLDEST:  # it has no login() that never asks
            raise HalfstepError(
                f"exporter wandb:{project}", f"wandb {wandb.__version__} is too old", "Run: pip install -U wandb"
            )
        fix = "Run wandb login, or set WANDB_MODE=offline and run wandb sync later."
        if wandb.run is None and wandb.setup().settings.mode not in ("offline", "dryrun", "disabled"):
            try:
                is_known = wandb.login(prompt=False, verify=False)
            except wandb.Error as error:
                raise HalfstepError(f"exporter wandb:{project}", str(error), fix) from None
            if not is_known:
                raise HalfstepError(f"exporter wandb:{project}", "nobody is logged in", fix)
        try:
            self._run = wandb.init(
                project=project,
                name=run,
                group=run,
                reinit="create_new",  # a script may have a run of its own
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise HalfstepError(f"exporter wandb:{project}", str(error), fix) from None
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._facts = Facts()
        self._num_alerts = 0
        self._exit_code = 1  # of a run that never says how it ended
        if not self._run.offline:
            logger.info("Weights & Biases: %s", self._run.url)

    def write(self, entry: Entry) -> None:
        fact, kind = self._facts.of(entry), entry["kind"]
        if fact.numbers:
            self._run.log({"step": fact.step, **fact.numbers})
        if kind == "alert":
            self._num_alerts += 1
            self._run.log({"step": fact.step, "num_alerts": self._num_alerts, "alert": fact.sentence})
            title = f"{entry['rule']} at step {fact.step}"[:_TITLE_LENGTH]
            self._run.alert(title, fact.sentence, level=_LEVELS.get(entry["severity"], "ERROR"))
        elif fact.sentence:
            self._run.log({"step": fact.step, "event": fact.sentence})
        if kind == "run":
            self._run.config.update(describe(entry), allow_val_change=True)
        elif kind == "end":
            self._exit_code = int(entry["state"] != "finished")

    def close(self) -> None:
        self._run.finish(exit_code=self._exit_code)
