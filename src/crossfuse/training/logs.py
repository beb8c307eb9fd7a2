"""What a run writes while it trains: JSON lines, TensorBoard events, and a report of each step for a progress bar."""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

LOG, EVENTS = "log.jsonl", "tensorboard"


@dataclasses.dataclass(frozen=True)
class StepInfo:
    """One optimiser step. Tokens are those of all processes, rates per second of wall time, over
    the last 20 steps, without validation and saves.

    loss: mean in nats a supervised token of the last logged step; None before the first.
    memory: peak bytes of this process: on the accelerator, or resident without one.
    """

    step: int
    steps: int
    loss: float | None
    text_tokens: int
    image_tokens: int
    text_rate: float
    image_rate: float
    memory: int
    validation_loss: float | None = None


def peak_memory() -> int:
    """Bytes: of the accelerator where there is one, else the peak resident set of this process."""
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class StepReport(TrainerCallback):
    """Collects the losses, measures the rates and hands each step on; the main process writes the logs.

    tokens: gives (text, image) tokens of the step just done.
    """

    def __init__(
        self,
        tokens: Callable[[], tuple[int, int]],
        progress: Callable[[StepInfo], None] | None = None,
        folder: Path | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.losses: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []
        self.text_tokens = self.image_tokens = 0
        self._tokens, self._progress, self._folder, self._say = tokens, progress, folder, say
        self._mark = time.perf_counter()
        self._since = [0.0, 0, 0]  # seconds, text and image tokens since the last log
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=20)
        self._events: Any = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._folder is not None:
            _drop_later_lines(self._folder / LOG, state.global_step)
            self._events = _event_writer(self._folder / EVENTS, state.global_step, self._say)
        self._mark = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        now = time.perf_counter()
        text, image = self._tokens()
        self.text_tokens, self.image_tokens = self.text_tokens + text, self.image_tokens + image
        spent, self._mark = now - self._mark, now
        self._since = [old + new for old, new in zip(self._since, (spent, text, image), strict=True)]
        self._recent.append((spent, text, image))
        seconds, texts, images = (sum(column) for column in zip(*self._recent, strict=True))
        info = StepInfo(
            step=state.global_step,
            steps=state.max_steps,
            loss=self.losses[-1][1] if self.losses else None,
            text_tokens=self.text_tokens,
            image_tokens=self.image_tokens,
            text_rate=texts / max(seconds, 1e-9),
            image_rate=images / max(seconds, 1e-9),
            memory=peak_memory(),
            validation_loss=self.validation[-1][1] if self.validation else None,
        )
        if self._progress is not None:
            self._progress(info)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if not logs:
            return
        if "eval_loss" in logs:
            self.validation.append((state.global_step, float(logs["eval_loss"])))
            self._write(state.global_step, {"validation_loss": logs["eval_loss"], "tokens": logs.get("eval_tokens")})
        elif "loss" in logs:
            self.losses.append((state.global_step, float(logs["loss"])))
            values: dict[str, Any] = {"loss": logs["loss"], "gradient_norm": logs.get("grad_norm")}
            groups = getattr(kwargs.get("optimizer"), "param_groups", ())
            values["learning_rate"] = {g["part"]: g["lr"] for g in groups if "part" in g} or logs.get("learning_rate")
            seconds, text, image = self._since
            values |= {
                "text_tokens": text,
                "image_tokens": image,
                "text_tokens_per_second": round(text / max(seconds, 1e-9), 2),
                "image_tokens_per_second": round(image / max(seconds, 1e-9), 2),
                "memory_bytes": peak_memory(),
            }
            self._since = [0.0, 0, 0]
            self._write(state.global_step, values)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._mark = time.perf_counter()

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def _write(self, step: int, values: dict[str, Any]) -> None:
        if self._folder is None:
            return
        with (self._folder / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        if self._events is None:
            return
        for name, value in values.items():
            parts = {f"{name}/{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
            for tag, number in parts.items():
                if isinstance(number, int | float):
                    self._events.add_scalar(tag, number, step)


def _drop_later_lines(path: Path, step: int) -> None:
    """A resumed run writes the steps after its checkpoint again."""
    if not path.is_file():
        return
    from crossfuse.storage import replace_file

    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue  # cut off by a crash
    replace_file(path, "".join(kept).encode())


def _event_writer(folder: Path, step: int, say: Callable[[str], None] | None) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        if say is not None:
            say("no TensorBoard events: install tensorboard, or crossfuse[train]; log.jsonl holds the same numbers")
        return None
    writer: Any = SummaryWriter(str(folder), purge_step=step + 1 if step else None)  # type: ignore[no-untyped-call]
    return writer
