"""A language model behind any OpenAI-compatible endpoint that picks the better of two commentaries.

Verdicts are kept in JSON lines as they come, so that a killed run goes on where it stopped; the win rate is a pure
function of them. Rule and wording after LiveCC's llm_judge.py (Chen et al. 2025): each pair is judged in both orders,
and "tie" counts for nobody.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from crossfuse.evaluation.benchmarks.base import Metric, Samples

WIN_RATE = "share of judgements for the model, each pair judged in both orders"
QUESTION = """You are an expert in video commentary. Two commentaries of one video follow, Commentary A and B. \
Select the one that is better aligned with the human commentary.
Judge by the first criterion; use the second only where the first does not decide:
1. Semantic alignment: the same meaning, details and key points as the human commentary.
2. Stylistic consistency: tone, choice of words and structure like the human commentary.

---Commentary A---
{a}
----------

---Commentary B---
{b}
----------

---Human Commentary---
{human}
----------

Reply with "Commentary A is better aligned with the human commentary" or "Commentary B is better aligned with the \
human commentary"."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Who won when the model's commentary stood first, and when it stood second: "model", "baseline" or "tie"."""

    sample_id: str
    first: str
    second: str
    judge: str
    baseline: str
    answer_hash: str


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible chat endpoint.

    Attributes:
        url: up to and including the version, as "http://127.0.0.1:8000/v1"; "/chat/completions" is added.
        model: name that the endpoint knows.
        key: bearer token; None reads OPENAI_API_KEY, and sends none where that is not set.
        timeout: seconds for one reply.
        tries: attempts for one question, with growing pauses, where the endpoint is busy or fails.
    """

    url: str
    model: str
    key: str | None = None
    timeout: float = 60.0
    tries: int = 4
    pause: float = 1.0

    def ask(self, prompt: str) -> str:
        """The reply to one prompt at temperature 0 with seed 42. `RuntimeError` after the last failed attempt."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0,
            "seed": 42,
        }
        headers = {"Content-Type": "application/json"}
        key = self.key or os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        address = self.url.rstrip("/") + "/chat/completions"
        if not address.startswith(("http://", "https://")):
            raise ValueError(f"the judge's url must start with http:// or https://; got {self.url!r}")
        request = urllib.request.Request(address, json.dumps(body).encode(), headers)
        for attempt in range(1, self.tries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return str(json.load(reply)["choices"][0]["message"]["content"])
            except urllib.error.HTTPError as error:
                # 4xx says that the request is at fault and will stay so; only 408 and 429 pass.
                if attempt == self.tries or (400 <= error.code < 500 and error.code not in (408, 429)):
                    raise RuntimeError(f"the judge at {address} answered {error.code} {error.reason}") from error
            except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
                if attempt == self.tries:
                    raise RuntimeError(
                        f"the judge at {address} gave no usable reply in {attempt} tries: {error}"
                    ) from error
            time.sleep(self.pause * 2 ** (attempt - 1))
        raise AssertionError("unreachable: the last attempt returns or raises")


def judge(
    answers: Mapping[str, str],
    samples: Samples,
    endpoint: Endpoint,
    file: str | os.PathLike[str],
    progress: Callable[[int], None] | None = None,
) -> list[Verdict]:
    """A verdict for each sample, in their order; those in `file` for the same answer and judge are not asked again.

    Args:
        samples: their references hold "human" and "baseline" commentaries.
        file: JSON lines, appended to at once.
        progress: called with 1 for each verdict.

    Raises:
        ValueError: a sample without an answer, a human or a baseline commentary.
        RuntimeError: the endpoint does not answer; the verdicts so far are in the file.
    """
    known = {(v.sample_id, v.judge, v.baseline, v.answer_hash): v for v in read_verdicts(file)}
    verdicts = []
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        for sample in samples:
            id, reference = sample.record.id, sample.reference
            if id not in answers or not reference.get("human") or not reference.get("baseline"):
                raise ValueError(
                    f"sample {id!r} needs an answer, a human commentary (gt_asr.jsonl) and a baseline's (captions/)"
                )
            answer, baseline = answers[id], str(reference.get("baseline_name") or "baseline")
            digest = hashlib.sha256(answer.encode()).hexdigest()[:16]
            verdict = known.get((id, endpoint.model, baseline, digest))
            if verdict is None:
                first = _winner(endpoint, answer, reference["baseline"], reference["human"], "model", "baseline")
                second = _winner(endpoint, reference["baseline"], answer, reference["human"], "baseline", "model")
                verdict = Verdict(id, first, second, endpoint.model, baseline, digest)
                lines.write(json.dumps(dataclasses.asdict(verdict)) + "\n")
                lines.flush()
            verdicts.append(verdict)
            if progress is not None:
                progress(1)
    return verdicts


def read_verdicts(file: str | os.PathLike[str]) -> list[Verdict]:
    """Verdicts of a file; an unfinished last line, which a killed run leaves, is cut off. Empty without a file."""
    path = Path(file)
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with path.open("r+b") as handle:
            handle.truncate(len(whole))
    return [Verdict(**json.loads(line)) for line in whole.decode().splitlines()]


def win_rate(verdicts: Iterable[Verdict | Mapping[str, Any]]) -> dict[str, Metric]:
    """Win rate and share of ties over both orders, in per cent, and how many pairs the order alone decided."""
    found = [v if isinstance(v, Verdict) else Verdict(**v) for v in verdicts]
    names = sorted({f"judge {v.judge}, baseline {v.baseline}" for v in found})
    variant = f"{WIN_RATE}; {'; '.join(names)}"
    if not found:
        return {"win_rate": Metric(None, 0, variant, "0-100", reason="no verdicts")}
    picks = [pick for v in found for pick in (v.first, v.second)]
    swayed = sum({v.first, v.second} == {"model", "baseline"} for v in found)
    return {
        "win_rate": Metric(100 * picks.count("model") / len(picks), len(found), variant, "0-100"),
        "ties": Metric(
            100 * picks.count("tie") / len(picks), len(found), f"judgements for neither; {variant}", "0-100"
        ),
        "order_decided": Metric(float(swayed), len(found), "pairs whose winner changed with the order", "count"),
    }


def win_rate_by_step(
    answers: Mapping[int, Mapping[str, str]], samples: Samples, endpoint: Endpoint, file: str | os.PathLike[str]
) -> dict[int, Metric]:
    """Win rate of each training step's answers, steps in rising order: the curve of the papers' figure."""
    return {step: win_rate(judge(answers[step], samples, endpoint, file))["win_rate"] for step in sorted(answers)}


def _winner(endpoint: Endpoint, a: str, b: str, human: str, name_a: str, name_b: str) -> str:
    reply = endpoint.ask(QUESTION.format(a=a, b=b, human=human))
    if "Commentary A" in reply:
        return name_a
    return name_b if "Commentary B" in reply else "tie"
