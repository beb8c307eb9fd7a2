"""Score a model on unseen data: ``python scripts/score_embedded.py src/crossfuse/assets/model``.

Exact match of greedy ``generate`` with the real processor, on the whole test set of easy-VQA and on test scenes; beside
each score the one with the pictures shuffled between the questions, which shows what the words alone are worth.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from crossfuse.data.easy_vqa import EasyVQA
from crossfuse.data.questions import SceneQuestions

Item = tuple[Image.Image, str, str, str]  # picture, question, answer, group


def easy_vqa_items(limit: int) -> list[Item]:
    """The test questions of easy-VQA, in two groups: yes/no and all others."""
    data = EasyVQA("test")
    items = [data[i] for i in range(min(limit, len(data)))]
    return [(i.image, i.question, i.answer, "yes/no" if i.answer in ("yes", "no") else "not yes/no") for i in items]


def scene_items(limit: int) -> list[Item]:
    """Questions about test scenes, grouped by kind."""
    data = SceneQuestions("test", limit)
    return [(image, question.text, question.answer, question.kind) for image, question, _ in data]


@torch.no_grad()
def generate(model: Any, processor: Any, items: list[Item], batch: int = 64) -> Iterator[str]:
    """Greedy answers, batched with left padding."""
    longest = 64 if any(group == "caption" for *_, group in items) else 4
    for first in range(0, len(items), batch):
        part = items[first : first + batch]
        prompts = [
            processor.apply_chat_template(
                [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}],
                add_generation_prompt=True,
            )
            for _, question, _, _ in part
        ]
        images = [[image] for image, *_ in part]
        inputs = processor(images=images, text=prompts, padding=True, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=longest, do_sample=False)
        yield from processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def shuffled(items: list[Item], seed: int = 0) -> list[Item]:
    """The same questions, each with another question's picture (a random cycle, so none keeps its own)."""
    order = list(range(len(items)))
    random.Random(seed).shuffle(order)
    moved = dict(zip(order, order[1:] + order[:1], strict=True))
    return [(items[moved[i]][0], *items[i][1:]) for i in range(len(items))]


def score(directory: Path, log: Callable[..., None] | None = None, limit: int = 10**6, scenes: int = 3000) -> None:
    """Print a table of scores with counts, and pass them on to ``log``."""
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    model = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(directory)
    row = "{:<12} {:<12} {:>6} {:>8} {:>8}   {}"
    print(row.format("data", "questions", "n", "right", "score", "with shuffled pictures"))
    for name, items in (("easy-vqa", easy_vqa_items(limit)), ("scenes", scene_items(scenes))):
        right: dict[str, list[tuple[bool, bool]]] = defaultdict(list)
        plain, mixed = (
            list(generate(model, processor, items)),
            list(generate(model, processor, shuffled(items))),
        )
        for (_, _, answer, group), a, b in zip(items, plain, mixed, strict=True):
            pair = (a.strip() == answer, b.strip() == answer)
            right[group].append(pair)
            if group != "caption":
                right["all" if name == "easy-vqa" else "all but caption"].append(pair)
        for group, pairs in sorted(right.items()):
            n, hits, mixed_hits = len(pairs), sum(a for a, _ in pairs), sum(b for _, b in pairs)
            print(
                row.format(name, group, n, hits, f"{hits / n:.1%}", f"{mixed_hits} = {mixed_hits / n:.1%}"),
                flush=True,
            )
            if log:
                log("score", data=name, questions=group, n=n, right=hits, shuffled=mixed_hits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--limit", type=int, default=10**6, help="questions of easy-VQA, all by default")
    parser.add_argument("--scenes", type=int, default=3000, help="questions about scenes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="also print each score as a line of JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    log = (lambda stage, **values: print(json.dumps(values))) if options.json else None
    score(options.directory, log, options.limit, options.scenes)


if __name__ == "__main__":
    main()
