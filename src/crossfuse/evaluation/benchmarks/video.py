"""Multiple choice over videos: MVBench, Video-MME, PerceptionTest, NExT-QA, MLVU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from crossfuse.data.records import Video
from crossfuse.evaluation.answers import LETTERS
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric, Samples
from crossfuse.evaluation.benchmarks.choice import LETTER_PROMPT, RULE, read_letters
from crossfuse.evaluation.benchmarks.files import document, find, find_all, lettered, place, question, rows
from crossfuse.evaluation.benchmarks.tally import by_group, grouped, mean_of, percent, unparsed
from crossfuse.evaluation.foreign_rules import first_letter, mvbench_letter, ranked_letter

# Where MVBench's videos lie in its release, by task.
MVBENCH_FOLDERS = {
    "object_interaction": "star/Charades_segment",
    "action_sequence": "star/Charades_segment",
    "action_prediction": "star/Charades_segment",
    "action_localization": "sta/sta_video_segment",
    "moving_count": "clevrer/video_validation",
    "fine_grained_pose": "nturgbd_convert",
    "character_order": "perception/videos",
    "object_shuffle": "perception/videos",
    "egocentric_navigation": "vlnqa",
    "moving_direction": "clevrer/video_validation",
    "episodic_reasoning": "tvqa/video_fps3_hq_segment",
    "fine_grained_action": "Moments_in_Time_Raw/videos",
    "scene_transition": "scene_qa/video",
    "state_change": "perception/videos",
    "moving_attribute": "clevrer/video_validation",
    "action_antonym": "ssv2_video_mp4",
    "unexpected_action": "FunQA_test/test",
    "counterfactual_inference": "clevrer/video_validation",
    "object_existence": "clevrer/video_validation",
    "action_count": "perception/videos",
}
MLVU_TASKS = ("anomaly_reco", "count", "ego", "needle", "order", "plotQA", "topic_reasoning")
Foreign = Callable[[str, list[str]], str | None]


def load_mvbench(root: Path, split: str) -> list[BenchmarkSample]:
    """``json/TASK.json``: lists of video, question, candidates, answer, with start and end where a span is meant."""
    samples: list[BenchmarkSample] = []
    for path in _named(root, MVBENCH_FOLDERS, "{}.json"):
        task = path.stem
        folder = MVBENCH_FOLDERS[task]
        for number, row in enumerate(rows(path)):
            options = [str(option) for option in row["candidates"]]
            text = f"Question:{row['question']}\nOption:\n{lettered(options, '({}) {}')}\nOnly give the best option.\n"
            clip = _clip(root, row["video"], [f"video/{folder}", folder, "video", ""], row.get("start"), row.get("end"))
            samples.append(
                _sample(f"{task}/{number}", text, clip, options, options.index(str(row["answer"])), task=task)
            )
    return samples


def load_videomme(root: Path, split: str) -> list[BenchmarkSample]:
    """The Parquet table of question_id, videoID, duration, domain, task_type, question, options ("A. ..."), answer."""
    samples: list[BenchmarkSample] = []
    for path in find_all(root, "test*.parquet", "*.parquet", "*.jsonl", "*.json") or [find(root, "*.parquet")]:
        for row in rows(path):
            options = [str(option).split(". ", 1)[-1].rstrip(".") for option in row["options"]]
            head = (
                "Select the best answer to the following multiple-choice question based on the video. "
                "Respond with only the letter (A, B, C, or D) of the correct option."
            )
            text = f"{head}\n{row['question']}\n" + "\n".join(row["options"]) + LETTER_PROMPT
            clip = _clip(root, f"{row['videoID']}.mp4", ["data", "videos", "video", ""])
            groups = {"duration": row["duration"], "domain": row["domain"], "task": row["task_type"]}
            samples.append(
                _sample(str(row["question_id"]), text, clip, options, LETTERS.index(row["answer"]), **groups)
            )
    return samples


def load_perception_test(root: Path, split: str) -> list[BenchmarkSample]:
    """``mc_question_SPLIT.json`` (videos by id, each with ``mc_question``), or the Parquet table a question a row."""
    parquet = find_all(root, "*val*.parquet", "*.parquet")
    if parquet:
        table = [(str(row["video_name"]), str(row["question_id"]), row) for path in parquet for row in rows(path)]
    else:
        content = document(find(root, f"mc_question_{split}.json", f"all_{split}.json"))
        table = [(name, str(row["id"]), row) for name, entry in content.items() for row in entry["mc_question"]]
    samples: list[BenchmarkSample] = []
    for name, id, row in table:
        options = [str(option) for option in row["options"]]
        text = f"{row['question']}\n{lettered(options)}{LETTER_PROMPT}"
        clip = _clip(root, f"{name}.mp4", ["videos", f"{split}_videos", ""])
        groups = {"area": row.get("area"), "reasoning": row.get("reasoning")}
        samples.append(_sample(f"{name}/{id}", text, clip, options, int(row["answer_id"]), **groups))
    return samples


def load_nextqa(root: Path, split: str) -> list[BenchmarkSample]:
    """``SPLIT.csv`` with a0 to a4 and the answer's index; ``map_vid_vidorID.json`` names the video files."""
    path = next(
        (p for p in find_all(root, f"{split}.csv", f"*{split}*.csv") if "a0" in p.read_text(encoding="utf-8")[:200]),
        None,
    )
    if path is None:
        raise ValueError(f"{root} has no {split}.csv with the columns a0 to a4 (multiple choice)")
    folders = nextqa_folders(root)
    samples: list[BenchmarkSample] = []
    for row in rows(path):
        options = [row[f"a{k}"].strip() for k in range(5)]
        text = f"{row['question'].strip()}\n{lettered(options)}{LETTER_PROMPT}"
        clip = _clip(root, f"{folders.get(row['video'], row['video'])}.mp4", ["NExTVideo", "videos", ""])
        groups = {"task": row["type"], "kind": {"C": "causal", "T": "temporal", "D": "descriptive"}[row["type"][0]]}
        samples.append(_sample(f"{row['video']}/{row['qid']}", text, clip, options, int(row["answer"]), **groups))
    return samples


def nextqa_folders(root: Path) -> dict[str, str]:
    """File name of each video id, as ``map_vid_vidorID.json`` has it; empty without that file."""
    found = find_all(root, "map_vid_vidorID.json")
    return {str(key): str(value) for key, value in document(found[0]).items()} if found else {}


def load_mlvu(root: Path, split: str) -> list[BenchmarkSample]:
    """``json/N_TASK.json`` of the seven multiple-choice tasks, or the Parquet table a question a row."""
    samples: list[BenchmarkSample] = []
    parquet = find_all(root, "*.parquet")
    for row in [row for path in parquet for row in rows(path)]:
        options = [str(option) for option in row.get("candidates") or _written(row["question"])]
        answer = (
            LETTERS.index(row["answer"]) if row["answer"] in LETTERS[: len(options)] else options.index(row["answer"])
        )
        task = str(row["task_type"])
        clip = _clip(root, row["video_name"], ["", "video"])
        samples.append(
            _sample(
                str(row.get("question_id", len(samples))),
                _mlvu_text(row["question"], options),
                clip,
                options,
                answer,
                task=task,
            )
        )
    for path in [] if parquet else _named(root, MLVU_TASKS, "*_{}.json"):
        for number, row in enumerate(rows(path)):
            options = [str(option) for option in row["candidates"]]
            task = path.stem.split("_", 1)[1]
            clip = _clip(root, row["video"], [f"video/{path.stem}", path.stem, "video", ""])
            text = _mlvu_text(row["question"], options)
            samples.append(
                _sample(f"{task}/{number}", text, clip, options, options.index(str(row["answer"])), task=task)
            )
    return samples


def _mlvu_text(text: str, options: list[str]) -> str:
    head = text.split("\n(A)")[0]
    return f"{head}\n{lettered(options, '({}) {}')}\nOnly give the best option.\nBest option: ("


def _written(text: str) -> list[str]:
    """Options that stand in the question as "(A) ..." lines."""
    return [line[4:].strip() for line in text.splitlines() if line[:1] == "(" and line[2:3] == ")"]


def _named(root: Path, tasks: Mapping[str, str] | tuple[str, ...], form: str) -> list[Path]:
    found = [path for task in tasks for path in find_all(root, form.format(task))[:1]]
    return found or [find(root, *(form.format(task) for task in list(tasks)[:3]))]


def _clip(root: Path, name: str, folders: list[str], start: Any = None, end: Any = None) -> Video:
    span = {key: float(value) for key, value in (("start", start), ("end", end)) if value is not None}
    return Video.model_validate({"path": str(place(root, str(name), *folders)), **span})


def _sample(id: str, text: str, clip: Video, options: list[str], answer: int, **groups: Any) -> BenchmarkSample:
    kind = str(groups.get("task") or groups.get("area") or "choice")
    reference = {"options": options, "answer": LETTERS[answer], **groups}
    return BenchmarkSample(question(id, text, video=clip, kind=kind), reference)


def _scorer(
    *groups: str, mean: str = "", foreign: Foreign | None = None, words: str = ""
) -> Callable[..., dict[str, Metric]]:
    """Share of right letters, by each group too; `mean` names the group whose shares are averaged for "accuracy"."""

    def score(answers: Mapping[str, str], samples: Samples) -> dict[str, Metric]:
        said = read_letters(answers, samples)
        scores = [float(letter == s.reference["answer"]) for letter, s in zip(said, samples, strict=True)]
        parts = {name: by_group(scores, samples, name, RULE) for name in groups}
        pooled = percent(scores, f"all questions; {RULE}")
        results = {"accuracy": pooled}
        if mean:
            results = {
                "accuracy": mean_of(parts[mean], f"mean over {len(parts[mean])} {mean}s; {RULE}"),
                "accuracy/pooled": pooled,
            }
        for metrics in parts.values():
            results |= {f"accuracy/{name}": metric for name, metric in metrics.items()}
        if foreign is not None:
            results["accuracy@lmms-eval"] = _foreign(answers, samples, foreign, words, mean)
        return results | {"unparsed": unparsed(said)}

    return score


def _foreign(answers: Mapping[str, str], samples: Samples, rule: Foreign, words: str, mean: str) -> Metric:
    asked = [s for s in samples if not (rule is _mvbench and answers[s.record.id] == "")]
    right = {
        s.record.id: float(rule(answers[s.record.id], s.reference["options"]) == s.reference["answer"]) for s in asked
    }
    if not mean:
        return percent(list(right.values()), words)
    groups = grouped(asked, lambda s: s.reference[mean])
    shares = {name: percent([right[s.record.id] for s in members], words) for name, members in groups.items()}
    if rule is _mlvu:
        # lmms-eval divides by all seven tasks, those without a question included.
        total = sum(metric.value or 0.0 for metric in shares.values())
        return Metric(total / len(MLVU_TASKS), len(asked), words, "0-100")
    return mean_of(shares, words)


def _mvbench(answer: str, options: list[str]) -> str | None:
    return mvbench_letter(answer)


def _ranked(answer: str, options: list[str]) -> str | None:
    return ranked_letter(answer, "ABCD")


def _mlvu(answer: str, options: list[str]) -> str | None:
    return ranked_letter(answer, "ABCD")


def _first(answer: str, options: list[str]) -> str | None:
    return first_letter(answer.strip(), "ABCD")


def _benchmark(name: str, loader: Any, scorer: Any, **fields: Any) -> Benchmark:
    return Benchmark(name=name, loader=loader, scorer=scorer, metric="accuracy", video=True, **fields)


MV_BENCH = _benchmark(
    "mvbench", load_mvbench,
    _scorer("task", mean="task", foreign=_mvbench, words="lmms-eval: first letter a to e; empty answers left out"),
    rule="accuracy of the option's letter, mean over the 20 tasks",
    source="Li et al. 2024 (arXiv 2311.17005)", lmms_task="mvbench",
    samples="4,000 (20 x 200 in the paper; repeated questions were replaced later)",
    disagreements='lmms-eval takes the word "a" as option A and leaves empty answers out of the count',
)  # fmt: skip
VIDEO_MME = _benchmark(
    "videomme", load_videomme,
    _scorer("duration", "domain", "task", foreign=_ranked, words="lmms-eval: ranked letter marks"),
    rule="accuracy of the option's letter, all and by duration, domain and task",
    source="Fu et al. 2024 (arXiv 2405.21075)", samples="2,700 (900 videos)", lmms_task="videomme",
    disagreements="with or without subtitles (here: without); tools read verbose answers differently",
)  # fmt: skip
PERCEPTION_TEST = _benchmark(
    "perceptiontest", load_perception_test,
    _scorer("area", "reasoning", foreign=_first, words="lmms-eval: first capital letter A to D that stands alone"),
    rule="top-1 accuracy of the multiple-choice questions", splits=("valid", "train"),
    source="Patraucean et al. 2023 (arXiv 2305.13786), mc_vqa baseline", samples="19,140 (valid; count not confirmed)",
    lmms_task="perceptiontest_val_mc", disagreements='lmms-eval reads "A person ..." as option A',
)  # fmt: skip
NEXT_QA = _benchmark(
    "nextqa", load_nextqa, _scorer("kind", "task"),
    rule="accuracy of the option's letter, all, by kind (causal, temporal, descriptive) and by type",
    splits=("test", "val", "train"), source="Xiao et al. 2021 (arXiv 2105.08276)",
    samples="8,564 (test), 4,996 (val; count not confirmed)",
    lmms_task="nextqa_mc_test", disagreements="lmms-eval guesses at random where it cannot read an answer",
)  # fmt: skip
MLVU = _benchmark(
    "mlvu", load_mlvu,
    _scorer("task", mean="task", foreign=_mlvu, words="lmms-eval: ranked letter marks; divided by 7 tasks"),
    rule="M-Avg: accuracy of the option's letter, mean over the multiple-choice tasks present", splits=("dev",),
    source="Zhou et al. 2024 (arXiv 2406.04264)", lmms_task="mlvu_dev",
    samples="2,174 (dev, seven tasks; count not confirmed)",
    disagreements="lmms-eval divides by all seven tasks even where some are absent",
)  # fmt: skip
