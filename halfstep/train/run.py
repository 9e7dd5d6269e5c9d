"""A training job from its settings to its report."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback

from halfstep.errors import HalfstepError, ScaleExhausted
from halfstep.hardware import detect
from halfstep.integrations.staging import Staging
from halfstep.interruption import Interruption
from halfstep.policy import Policy, check_module_rules, resolve
from halfstep.share import num_ranks
from halfstep.train.adapters import adapt, check_packages, for_adapters, num_parameters
from halfstep.train.begun import Begun
from halfstep.train.dataset import read
from halfstep.train.defaults import with_defaults
from halfstep.train.folder import folder_of, last_checkpoint, step_of
from halfstep.train.held import Held
from halfstep.train.lengths import check_lengths
from halfstep.train.observer import Observer, ends_of
from halfstep.train.planned import plan_job
from halfstep.train.pretrained import find
from halfstep.train.progress import Progress, Show
from halfstep.train.settings import Settings
from halfstep.train.train_report import TrainReport
from halfstep.train.trainer import make_trainer


def train(settings: Settings, show: Show = lambda text, step, total: None) -> TrainReport:
    """Train as ``settings`` say.

    What cannot be trained is refused before anything is written: a HalfstepError in one line.
    show: told what happens.
    """
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = replace(settings, device=device)
    place = place_of(device)
    requested = Policy.parse(settings.policy)
    policy = resolve(requested, detect(place))[0]
    check_packages(settings)
    folder = folder_of(settings)
    checkpoint = last_checkpoint(folder) if settings.resume else None
    show("reading data", 0, settings.steps)
    data = read(settings.task, settings.data, seed=settings.seed)
    pretrained = find(settings.model, data, settings.seed)
    check_module_rules(requested.modules, (name for name, _ in pretrained.skeleton.named_modules()))
    settings = with_defaults(settings, pretrained.context)
    assert settings.max_length is not None
    begun = Begun.of(settings, data.digest, num_ranks())
    done = 0 if checkpoint is None else step_of(checkpoint)
    resumed = () if checkpoint is None else begun.check(folder, done)
    lengths = check_lengths(data, pretrained.tokenizer, settings.max_length, pretrained.context)
    planned = []
    if settings.plan or settings.memory is not None:
        show("planning memory", 0, settings.steps)
        longest = settings.max_length if data.task == "pretrain" else min(settings.max_length, lengths.longest)
        planned.append(str(plan_job(settings, pretrained.skeleton, policy, place, longest)))
    show("loading weights", 0, settings.steps)
    adapted = adapt(pretrained.load(Held.by(settings, policy, place)), settings, policy, place)
    observer = Observer()
    if settings.lora:
        requested = for_adapters(requested)
    trainer = make_trainer(settings, pretrained, adapted, data, requested, folder, observer)
    with Interruption(waits_alone=True) as interruption:
        progress = Progress(show, lambda: trainer.stepper, interruption, lambda: begun.write(folder))
        trainer.add_callback(progress)
        trainer.remove_callback(PrinterCallback)
        start = time.perf_counter()
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        except ScaleExhausted as error:
            raise _kept(trainer, error) from None
        seconds = time.perf_counter() - start
    step, total = trainer.state.global_step, trainer.state.max_steps
    evaluation = None
    if data.evaluation is not None and progress.stopped_at is None:
        show("evaluating", step, total)
        evaluation = _evaluation(trainer)
    show("saving the model", step, total)
    _save(trainer, folder / "model")
    trainer.stepper.close()
    first, last = ends_of(observer.losses)
    info = trainer.info
    parameters = list(adapted.model.parameters())
    return TrainReport(
        task=settings.task,
        model=settings.model,
        data=data.source,
        output=str(folder),
        requested=info.requested,
        effective=info.effective,
        reason=info.reason,
        device=info.device,
        num_parameters=num_parameters(adapted.model),
        num_trained=sum(p.numel() for p in parameters if p.requires_grad),
        precision=observer.precision(),
        loss_first=first,
        loss_last=last,
        evaluation=evaluation,
        seconds=seconds,
        stopped_at=progress.stopped_at,
        notes=(
            *resumed,
            *_went_on(done, total),
            *data.notes,
            *pretrained.notes,
            *lengths.notes,
            *adapted.notes,
            *planned,
            trainer.log_probs_note,
        ),
    )


def place_of(device: str) -> str:
    """The device of this rank, as Accelerate chooses it: under torchrun ``cuda`` is not the same card for all."""
    rank = os.environ.get("LOCAL_RANK", "")
    num = torch.cuda.device_count() if device == "cuda" and rank.isdecimal() else 0
    return f"cuda:{int(rank) % num}" if num else device


def _went_on(done: int, total: int) -> tuple[str, ...]:
    """Since a report is of the steps that this call took."""
    if not done:
        return ()
    if done >= total:
        return (f"All {done} steps had been taken before: nothing was trained.",)
    return (f"It went on from step {done}; what is said of steps and losses is of those after it.",)


def _kept(trainer: Any, error: ScaleExhausted) -> ScaleExhausted:
    """``error``, with a checkpoint of the last applied step to go on from under another policy."""
    step = trainer.state.global_step
    folder = Path(trainer.args.output_dir) / f"checkpoint-{step}"
    if step and not folder.exists():
        trainer.stepper.drop()
        with suppress(HalfstepError):  # of a full disk, which is not why the run ends
            trainer._save_checkpoint(trainer.model, None)
    if not folder.exists():
        return error
    return ScaleExhausted(error.what, error.why, f"{error.fix} --resume with another --policy goes on from {folder}.")


def _evaluation(trainer: Any) -> float:
    """The loss on what is held out, which --options may have asked for at the last step already."""
    last: dict[str, Any] = next((log for log in reversed(trainer.state.log_history) if "eval_loss" in log), {})
    if last.get("step") == trainer.state.global_step and not trainer.args.load_best_model_at_end:
        return float(last["eval_loss"])
    return float(trainer.evaluate()["eval_loss"])


def _save(trainer: Any, folder: Path) -> None:
    """Write the trained model; it has its name when all of it is there. Every rank calls it."""
    if trainer.is_fsdp_enabled:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")  # a model, not a checkpoint
    staging = Staging(folder, trainer.args.should_save)
    with staging.writing():
        trainer.save_model(str(staging.part))
        if trainer.args.should_save:
            staging.publish()
