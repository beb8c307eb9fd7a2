"""The model that lmms-eval asks, with every answer on disk at once. Imports lmms-eval; `lmms_runs` uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from crossfuse.evaluation.generation import ask_missing, prompt_text, run_settings
from crossfuse.evaluation.lmms_plugin import Crossfuse, Records, decoding_of
from crossfuse.evaluation.predictions import PredictionFile, of_shard
from crossfuse.evaluation.processes import Processes
from crossfuse.evaluation.runs import prediction_file
from crossfuse.evaluation.samples import picture_key


class RecordedCrossfuse(Crossfuse):
    """Answers that a run's folder holds are not asked again; the processes of a launch share the samples by their ids.

    Attributes:
        asked: id -> (prompt, key of the pictures) of all samples, whichever process has asked them.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        *,
        name: str,
        task: str,
        directory: Path,
        batch_size: int,
        processes: Processes,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(model=model, processor=processor, batch_size=batch_size)
        self.asked: dict[str, tuple[str, str]] = {}
        self._name, self._task, self._directory = name, task, directory
        self._processes, self._progress = processes, progress
        self._file: PredictionFile | None = None
        self._done, self._total = 0, 0

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """As lmms-eval wants it; every finished batch is on disk before the next starts."""
        kinds = [decoding_of(request.args[1]) for request in requests]
        different = [kind for i, kind in enumerate(kinds) if kind not in kinds[:i]]
        settings = run_settings(self.model, self._name, batch_size=self.batch_size, max_new_tokens=0)
        decoding = different[0] if len(different) == 1 else {"by request": different}
        shard = (self._processes.index, self._processes.count)
        self._total = len(requests)
        with prediction_file(self._directory, self._task, settings, decoding=decoding, shard=shard) as self._file:
            return super().generate_until(requests)

    def _answers(self, asked: Records, decoding: dict[str, Any]) -> list[str]:
        assert self._file is not None
        ids: list[str] = []
        own: dict[str, str] = {}
        for records in asked.chunks(self.batch_size):
            ids += [record.id for record in records]
            self.asked |= {record.id: (prompt_text(record), picture_key(record)) for record in records}
            mine = [r for r in records if of_shard(r.id, self._processes.index, self._processes.count)]
            texts = ask_missing(
                self.model, self.processor, mine, self._file, decoding=decoding, progress=self._advance
            )  # fmt: skip
            own |= {record.id: text for record, text in zip(mine, texts, strict=True)}
        everybody = {id: text for part in self._processes.gather(own) for id, text in part.items()}
        return [everybody[id] for id in ids]

    def _advance(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total // self._processes.count)
