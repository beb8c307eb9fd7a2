"""What a benchmark is here: a loader of its published files, and a pure scoring rule with a source."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from crossfuse.data.records import Record


@dataclasses.dataclass(frozen=True)
class Metric:
    """One score and all that is needed to compare it with somebody else's.

    Attributes:
        value: the score on `scale`, or None where it could not be computed; `reason` then says why.
        n: number of samples (questions, captions, groups: what `variant` counts) behind it.
        variant: the rule in words, as "VQA accuracy, official answer processing, leave one out".
        scale: "0-1", "0-100", "count" or the range that the rule has, as "0-2000".
        library: "name version" of the library that computed it; None for rules written here.
        reason: why `value` is None, or a warning on a value that is there (a cut text, one sample only).
    """

    value: float | None
    n: int
    variant: str
    scale: str
    library: str | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class BenchmarkSample:
    """A question to ask and what its answer is scored against.

    Attributes:
        record: images, prompt and, in `meta`, group names for tables. Its id is unique within the benchmark.
        reference: right answer and groups, as the benchmark's rule needs them; JSON values.
    """

    record: Record
    reference: dict[str, Any]


Samples = Sequence[BenchmarkSample]
Loader = Callable[[Path, str], "list[BenchmarkSample]"]
Scorer = Callable[[Mapping[str, str], Samples], dict[str, Metric]]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A public benchmark that runs on its own files, without any network.

    Attributes:
        name: as users write it after ``--tasks``.
        rule: the scoring rule in a sentence.
        source: where the rule is published.
        samples: what the published set holds, as "9,000 (3 x 3,000)".
        splits: names that `load` takes; the first is the default.
        metric: key of the metric that papers quote.
        max_new_tokens: enough for the answers that the rule reads.
        lmms_task: task of lmms-eval that asks the same questions; None where there is none that runs.
        disagreements: where tools are known to differ.
        captions: its scorer also takes `bertscore_model` and `bertscore_layers`.
    """

    name: str
    rule: str
    source: str
    samples: str
    metric: str
    loader: Loader
    scorer: Scorer
    splits: tuple[str, ...] = ("test",)
    max_new_tokens: int = 16
    lmms_task: str | None = None
    disagreements: str = ""
    video: bool = False
    captions: bool = False

    def load(
        self, directory: str | os.PathLike[str], split: str | None = None, limit: int | None = None
    ) -> list[BenchmarkSample]:
        """Samples of the files in `directory`, in file order; images and videos are paths, opened when asked for.

        Raises:
            ValueError: an unknown split, a directory without the files (the message names those looked for), a file
                in another format, a sample id that occurs twice, or a limit below 1.
        """
        root = Path(directory)
        if not root.is_dir():
            raise ValueError(f"{self.name}: {root} is no directory; give the one that holds the published files")
        if split is not None and split not in self.splits:
            raise ValueError(f"{self.name} has no split {split!r}; its splits: {', '.join(self.splits)}")
        if limit is not None and limit < 1:
            raise ValueError(f"limit must be at least 1; got {limit}")
        samples = self.loader(root, split or self.splits[0])
        seen: set[str] = set()
        for sample in samples:
            if sample.record.id in seen:
                raise ValueError(f"{self.name}: sample id {sample.record.id!r} occurs twice in {root}")
            seen.add(sample.record.id)
        return samples if limit is None else samples[:limit]

    def score(self, answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
        """Metrics of the answers (by sample id) to these samples. Pure: no model, no network, no state.

        A key is "metric", "metric/group" or, under another tool's rule, "metric@rule". Answers to other samples are
        left out.

        Raises:
            ValueError: no samples, or samples without an answer (an empty answer is one).
        """
        if not samples:
            raise ValueError(f"{self.name}: there are no samples to score")
        missing = [sample.record.id for sample in samples if sample.record.id not in answers]
        if missing:
            raise ValueError(
                f"{self.name}: {len(missing)} of {len(samples)} samples have no answer (first: {missing[0]!r}); "
                "finish the run, or score the answered samples only"
            )
        return self.scorer(answers, samples)
