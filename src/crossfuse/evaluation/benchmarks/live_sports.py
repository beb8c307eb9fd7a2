"""LiveSports-3K-CC: commentaries of sports clips, judged by a language model against a baseline's commentaries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from crossfuse.data.records import Video
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric, Samples
from crossfuse.evaluation.benchmarks.files import find, find_all, place, question, rows
from crossfuse.evaluation.judge import WIN_RATE, win_rate

ROLE = (
    "You are an expert video commentator providing real-time, insightful, and engaging commentary on visual content.\n"
)


def load(root: Path, split: str) -> list[BenchmarkSample]:
    """Events (video, video_id, event_id, begin, end, event_title and speech), human and baseline words.

    The releases mean different things by ``event_asr``. In the first it is the speech *before* the event, and the
    human commentary is kept back (``gt_asr.jsonl``). Since May 2025 it is the human commentary itself, and the speech
    before stands in ``preasr``: with that column the prompt takes ``preasr_text`` and the judge ``event_asr_text``.
    The baseline is ``captions/GPT-4o.jsonl``, else the first file of ``captions/``; its captions and the human ones may
    be absent: then answers can be asked for, but not judged.
    """
    events = find_all(
        root, f"LiveSports-3K-CC-{split}.csv", "LiveSports-3K-CC.json", "*LiveSports*CC*.parquet", f"{split}*.parquet",
        "*.parquet", "sports3k-cc*.jsonl", "events*.jsonl",
    )  # fmt: skip
    human = {_key(row): str(row["gt_asr"]) for path in find_all(root, "gt_asr.jsonl") for row in rows(path)}
    captions = find_all(root, "captions/GPT-4o.jsonl", "captions/*.jsonl")[:1]
    baseline = {_key(row): str(row["pred"]) for path in captions for row in rows(path)}
    samples: list[BenchmarkSample] = []
    for path in events or [find(root, "LiveSports-3K-CC*", "*.parquet", "sports3k-cc*.jsonl", "events*.jsonl")]:
        for row in rows(path):
            key = _key(row)
            text = ROLE
            if row.get("event_title"):
                text += f'This is a video titled "{row["event_title"]}".\n'
            told = "preasr" in row or "preasr_text" in row
            before = row.get("preasr_text") if told else row.get("event_asr")
            if before:
                text += f"Here is previous commentary of the video:\n\n{before}\n\n"
                text += "Please continue to comment the video."
            file = place(root, Path(str(row.get("video") or f"{row['video_id']}.mp4")).name, "videos", "video", "")
            clip = Video(path=str(file), start=float(row["begin"]), end=float(row["end"]))
            reference = {
                "human": human.get(key) or (str(row["event_asr_text"]) if told and row.get("event_asr_text") else None),
                "baseline": baseline.get(key),
                "baseline_name": captions[0].stem if captions else None,
            }
            samples.append(
                BenchmarkSample(question(key, text, video=clip, kind=str(row.get("class", "sports"))), reference)
            )
    return samples


def score(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
    """The win rate of verdicts that stand in the samples' references; without them, null and how to get them.

    Scoring asks nobody: `crossfuse.evaluation.judge.judge` collects the verdicts, and its `win_rate` scores them.
    """
    verdicts = [v for s in samples if (v := s.reference.get("verdict")) is not None]
    if len(verdicts) < len(samples):
        why = (
            f"{len(samples) - len(verdicts)} of {len(samples)} commentaries have no verdict: judge them with "
            "crossfuse.evaluation.judge.judge and an OpenAI-compatible endpoint"
        )
        return {"win_rate": Metric(None, len(samples), WIN_RATE, "0-100", reason=why)}
    return win_rate(verdicts)


def _key(row: Mapping[str, object]) -> str:
    return f"{row['video_id']}_{row['event_id']}"


LIVE_SPORTS = Benchmark(
    name="livesports3k",
    rule="share of pairwise judgements, in both orders, that prefer the model's commentary to the baseline's",
    source="Chen et al. 2025 (arXiv 2504.16030), llm_judge.py of LiveCC's repository",
    samples="1,702 events (first release: 1,500 test, 202 val)",
    metric="win_rate",
    loader=load,
    scorer=score,
    splits=("test", "val"),
    max_new_tokens=512,
    video=True,
    disagreements="the paper's judge is gpt-4o-2024-08-06 with seed 42; another judge gives another rate, so its name "
    "is part of the variant; the field event_asr is earlier speech in the first release and the human words since",
)
