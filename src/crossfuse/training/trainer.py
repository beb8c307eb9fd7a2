"""Running a recipe: transformers' Trainer, with what a fused model needs said once."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import DefaultFlowCallback, PrinterCallback, TrainerCallback

from crossfuse.devices import on_device_of
from crossfuse.training.checkpoints import CheckpointFolder, write_json
from crossfuse.training.fused_trainer import FusedTrainer, resumed_step
from crossfuse.training.groups import plain_model, trainable_table
from crossfuse.training.guards import NonFiniteLossError, Patience, StepGuard, StopSignal, watch_sigterm
from crossfuse.training.logs import StepInfo, StepReport
from crossfuse.training.recipe import Recipe
from crossfuse.training.schedule import Schedule, gradient_checkpointing, training_arguments
from crossfuse.training.trainable import LORA_TARGETS, prepare_trainable

__all__ = [
    "LORA_TARGETS",
    "FusedTrainer",
    "NonFiniteLossError",
    "StepInfo",
    "TrainingRun",
    "fine_tune",
    "mean_loss",
    "prepare_trainable",
    "run",
]

RECIPE, SUMMARY = "recipe.json", "run.json"


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """What a run did. `losses` and `validation`: (optimiser step, mean loss in nats a token).

    seconds, samples, tokens: of this call, without the steps before a resume. stopped: why it ended ("signal" is
    SIGTERM).
    """

    losses: list[tuple[int, float]]
    seconds: float
    steps: int
    samples: int
    trained_parameters: int
    validation: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    text_tokens: int = 0
    image_tokens: int = 0
    best_step: int | None = None
    stopped: Literal["finished", "patience", "signal"] = "finished"


def fine_tune(
    model: Any, dataset: Any, collator: Any, recipe: Recipe, *, progress: Callable[[int], None] | None = None
) -> TrainingRun:
    """Train `model` (from `prepare_trainable`) in place, without writing anything.

    Args:
        dataset: map-style; read in an order that depends on the recipe's seed alone, over again where it is
            too short.
        collator: turns a list of its items into model inputs with `labels`.
        progress: called with 1 after each optimiser step.
    """
    report = None if progress is None else (lambda info: progress(1))
    return train(model, dataset, collator, recipe, progress=report)


def train(
    model: Any,
    dataset: Any,
    collator: Any,
    recipe: Recipe,
    *,
    out: Path | None = None,
    validation: Any = None,
    resume: bool = False,
    progress: Callable[[StepInfo], None] | None = None,
    say: Callable[[str], None] | None = None,
    stop: StopSignal | None = None,
    callbacks: list[TrainerCallback] | None = None,
) -> TrainingRun:
    """Train a prepared model in place; with `out`, write logs and checkpoints there, and go on from them.

    Args:
        out: the run's directory; None writes nothing.
        validation: data for the validation loss (never packed).
        resume: go on from the last checkpoint in `out`.
        say: takes lines for the user.
        stop: looked at before each optimiser step; where it has `received` a signal, the run saves and ends.

    Raises:
        NonFiniteLossError: a loss is nan or infinite; the batch is in `out`.
    """
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="crossfuse-"))) if out is None else out
        checkpoints = None if out is None else CheckpointFolder(out)
        arguments = training_arguments(recipe, scratch, checkpoints is not None, validation is not None)
        if recipe.gradient_checkpointing:
            stack.enter_context(gradient_checkpointing(plain_model(model)))
        trainer = FusedTrainer(
            model=model,
            args=arguments,
            train_dataset=dataset,
            eval_dataset=validation,
            data_collator=collator,
        )
        main = trainer.is_world_process_zero()
        trainer.recipe, trainer.checkpoints = recipe, checkpoints
        trainer.alignment_weight, trainer.return_logits = recipe.alignment_weight, recipe.return_logits
        trainer.image_token_ids = _placeholders(model)
        if recipe.packing is not None:
            trainer.lengths = _lengths(dataset, collator, trainer.image_token_ids, out, say if main else None)
        trainer.guard = StepGuard(trainer, out, stop)
        patience = Patience(recipe.patience)
        guard = trainer.guard
        report = StepReport(
            lambda: guard.tokens, progress if main else None, out if main else None, say if main else None
        )
        for kind in (PrinterCallback, DefaultFlowCallback):
            trainer.remove_callback(kind)
        schedule = Schedule(recipe, checkpoints is not None, validation is not None)
        own: list[TrainerCallback] = [guard, report, schedule, patience]
        for callback in (*own, *(callbacks or ())):
            trainer.add_callback(callback)
        stack.callback(report.close)
        last = checkpoints.last if checkpoints is not None and resume else None
        before = resumed_step(last) if last is not None else 0
        started = time.perf_counter()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        seconds = time.perf_counter() - started
        _unwrap(trainer, model)
    steps = trainer.state.global_step
    stopped: Literal["finished", "patience", "signal"] = "finished"
    if guard.stopping and steps < trainer.state.max_steps:
        stopped = "signal"
    elif patience.ran_out and steps < trainer.state.max_steps:
        stopped = "patience"
    return TrainingRun(
        losses=report.losses,
        seconds=seconds,
        steps=steps,
        samples=(steps - before) * recipe.batch_size * recipe.accumulation * arguments.world_size,
        trained_parameters=trained,
        validation=report.validation,
        text_tokens=report.text_tokens,
        image_tokens=report.image_tokens,
        best_step=trainer.state.best_global_step or None,
        stopped=stopped,
    )


def run(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    progress: Callable[[StepInfo], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> TrainingRun:
    """Load what the recipe names, train it, and leave logs, checkpoints and `run.json` in `out`.

    SIGTERM ends it after the step at hand, with a checkpoint. Under `accelerate launch` every process calls this.

    Args:
        resume: go on from the last checkpoint in `out`, with the losses of an unbroken run; from the start where there
            is none.
        progress: takes each step; None shows a bar where somebody watches.
        say: takes lines for the user, such as the table of what trains; None prints them. Main process only.

    Raises:
        ValueError: `out` holds a run already and `resume` is off, or the run there has another recipe.
        NonFiniteLossError: see `train`.
    """
    from accelerate import PartialState

    from crossfuse.training.held_out import hold_out
    from crossfuse.training.progress import training_bar
    from crossfuse.training.start import collator_for, open_sources, starting_model

    accelerated = torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())
    process = PartialState(cpu=not accelerated)
    tell = (say or print) if process.is_main_process else _silent
    out = Path(out)
    recipe = for_this_machine(recipe, tell)
    with watch_sigterm() as stop, contextlib.ExitStack() as stack:
        check_directory(out, recipe, resume)
        process.wait_for_everyone()
        if process.is_main_process:
            out.mkdir(parents=True, exist_ok=True)
            write_json(out / RECIPE, recipe.model_dump(mode="json"))
        torch.manual_seed(recipe.seed)
        model, processor = starting_model(recipe)
        data, validation = open_sources(recipe.data), open_sources(recipe.validation)
        if data is None:
            raise ValueError("the recipe names no data; give `data` a file, a hub id, scenes or easy-vqa")
        if recipe.validation_share is not None:
            data, validation = hold_out(data, recipe.validation_share, recipe.seed)
        model = prepare_trainable(model, recipe)
        tell(trainable_table(model, recipe))
        if resume and CheckpointFolder(out).last is None:
            tell(f"nothing to resume in {out}: training starts at step 0")
        if progress is None and process.is_main_process:
            progress = stack.enter_context(training_bar())
        result = train(
            model,
            data,
            collator_for(recipe, processor),
            recipe,
            out=out,
            validation=validation,
            resume=resume,
            progress=progress,
            say=tell,
            stop=stop,
        )
        if process.is_main_process:
            processor.save_pretrained(out / "processor")
            write_json(out / SUMMARY, dataclasses.asdict(result))
        if result.stopped == "signal":
            tell(f"SIGTERM: saved after step {result.steps}; go on with --resume")
    return result


def check_directory(out: Path, recipe: Recipe, resume: bool) -> None:
    """Refuse to write over a run, or to go on with another recipe."""
    last = CheckpointFolder(out).last
    if last is None:
        if not resume and (out / "log.jsonl").is_file():
            (out / "log.jsonl").unlink(missing_ok=True)
            shutil.rmtree(out / "tensorboard", ignore_errors=True)
        return
    if not resume:
        raise ValueError(
            f"{out} holds a run already (step {resumed_step(last)}); go on with resume (--resume), or give another "
            "directory"
        )
    stored = Recipe.model_validate_json((out / RECIPE).read_text())
    free = {
        "description",
        "tags",
        "devices",
        "workers",
        "log_every",
        "eval_every",
        "save_every",
        "patience",
        "best_epoch",
        "accumulation",  # of one process: two of them make half as many passes
    }
    changed = [
        name for name in Recipe.model_fields if name not in free and getattr(stored, name) != getattr(recipe, name)
    ]
    if changed:
        raise ValueError(
            f"the run in {out} has another {', '.join(changed)}; resume with its own recipe ({out / RECIPE}), or give "
            "another directory"
        )


def for_this_machine(recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """The recipe with what this machine cannot do replaced, one line for each replacement."""
    changes: dict[str, Any] = {}
    if not torch.cuda.is_available():
        if recipe.precision == "fp16":
            changes["precision"] = "fp32"
            say("no GPU: precision fp16 is replaced by fp32")
        if recipe.optimizer in ("adamw_8bit", "paged_adamw_8bit", "adamw_fused"):
            changes["optimizer"] = "adamw"
            say(f"no GPU: optimizer {recipe.optimizer} is replaced by adamw")
    return recipe.changed(changes) if changes else recipe


def _silent(line: str) -> None:
    """For all processes but the main one."""


def _placeholders(model: Any) -> tuple[int, ...]:
    body = plain_model(model).model
    backbone = getattr(body, "_backbone", None)
    return tuple(backbone.placeholder_ids(body)) if backbone is not None else ()


def _lengths(dataset: Any, collator: Any, tokens: tuple[int, ...], out: Path | None, say: Any) -> Any:
    from crossfuse.training.lengths import sample_lengths

    if say is not None:
        say(f"measuring {len(dataset)} samples for packing")
    return sample_lengths(dataset, collator, tokens)


def _unwrap(trainer: FusedTrainer, model: Any) -> None:
    """Take accelerate's autocast wrapper off again: with it a model can be neither unfused nor trained anew.

    accelerate's own way down would end below the fused forward.
    """
    if not trainer.is_fsdp_enabled and model.__dict__.pop("_original_forward", None) is not None:
        del model.forward
    trainer.accelerator.free_memory()


@torch.inference_mode()
def mean_loss(model: nn.Module, batches: Any) -> float:
    """Mean cross-entropy in nats a supervised token over collated batches; logits are never kept."""
    total, tokens = 0.0, 0
    for batch in batches:
        # Labels are shifted by one: the first column predicts nothing.
        supervised = int((batch["labels"][:, 1:] != -100).sum())
        if supervised:
            loss = model(**on_device_of(model, batch), use_cache=False, return_logits=False).loss
            total += float(loss) * supervised
            tokens += supervised
    if not tokens:
        raise ValueError("no token of these batches has a label; the loss over nothing is undefined")
    return total / tokens
