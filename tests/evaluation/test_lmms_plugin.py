"""lmms-eval asks a fused model through the plug-in (where lmms-eval is installed), and its absence is told."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from types import SimpleNamespace

import pytest
from PIL import Image

from crossfuse.evaluation.lmms_engine import run_lmms_eval

needs_lmms_eval = pytest.mark.skipif(importlib.util.find_spec("lmms_eval") is None, reason="lmms-eval is not installed")
TASK = """
task: crossfuse_toy
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: answer
doc_to_visual: !function pictures.visual
generation_kwargs: {{max_new_tokens: 8, temperature: 0, do_sample: false, until: ["."]}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}}]
metadata: [{{version: 0.0}}]
"""


def test_absence_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "lmms_eval", None)
    with pytest.raises(RuntimeError, match=r"crossfuse\[eval\].*--local"):
        run_lmms_eval(None, None, ["pope"])


@needs_lmms_eval
def test_a_local_task_runs_on_a_fused_model(embedded, tmp_path, monkeypatch):
    import crossfuse as xf

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model, processor = copy.deepcopy(embedded[0]), embedded[1]
    xf.fuse(model, xf.TextAnchors(threshold=0.5))
    questions = ["Is there a circle?", "Is there a square?", "How many circles are there?"]
    picture = Image.new("RGB", (64, 64), "white")
    records = [xf_record(q, picture) for q in questions]
    from crossfuse.evaluation.generation import answer

    answers = [a.split(".")[0] for a in answer(model, processor, records, max_new_tokens=8)]
    truth = [answers[0], answers[1], "never"]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in zip(questions, truth, strict=True))
    )
    (tmp_path / "toy.yaml").write_text(TASK.format(rows=rows))
    (tmp_path / "pictures.py").write_text(
        "from PIL import Image\n\n\ndef visual(doc):\n    return [Image.new('RGB', (64, 64), 'white')]\n"
    )
    found = run_lmms_eval(
        model, processor, ["crossfuse_toy"], batch_size=2, include_path=tmp_path, include_defaults=False
    )
    metric = found["crossfuse_toy"]["exact_match"]
    assert metric.value == pytest.approx(2 / 3)
    assert metric.n == 3
    assert metric.library.startswith("lmms-eval ")


@needs_lmms_eval
def test_likelihoods_rank_the_greedy_answer_first(embedded):
    from crossfuse.evaluation.generation import answer
    from crossfuse.evaluation.lmms_plugin import Crossfuse

    model, processor = embedded
    picture, question = Image.new("RGB", (64, 64), "white"), "Is there a circle?"
    greedy = answer(model, processor, [xf_record(question, picture)])[0]
    engine = Crossfuse(model=model, processor=processor)
    engine.task_dict = {"toy": {"test": [{}]}}
    args = [(question, text, lambda _: [picture], 0, "toy", "test") for text in (greedy, "purple elephants")]
    (best, is_greedy), (other, other_greedy) = engine.loglikelihood([SimpleNamespace(args=a) for a in args])
    assert best < other
    assert is_greedy
    assert not other_greedy


@needs_lmms_eval
def test_c5_pictures_of_a_few_batches_are_open_at_once(embedded, monkeypatch):
    from crossfuse.evaluation import generation
    from crossfuse.evaluation.lmms_plugin import Crossfuse

    opened = []
    asked = []

    def visual(doc):
        opened.append(doc)
        return [Image.new("RGB", (8, 8))]

    def answer(model, processor, records, **settings):
        asked.append(len(opened))
        return [record.id for record in records]

    monkeypatch.setattr(generation, "answer", answer)
    engine = Crossfuse(model=embedded[0], processor=embedded[1], batch_size=2)
    engine.task_dict = {"toy": {"test": list(range(100))}}
    requests = [SimpleNamespace(args=("?", {"max_new_tokens": 4}, visual, i, "toy", "test")) for i in range(100)]
    requests.append(requests[7])  # asked twice: an id of its own
    texts = engine.generate_until(requests)
    assert texts == [*(f"toy/{i}" for i in range(100)), "toy/7/1"]
    assert asked == [32, 64, 96, 101]


@needs_lmms_eval
def test_manifest_and_arguments(embedded):
    from lmms_eval.models.registry_v2 import ModelRegistryV2

    from crossfuse.evaluation.lmms_plugin import Crossfuse, manifests

    registry = ModelRegistryV2()
    for manifest in manifests():
        registry.register_manifest(manifest)
    assert registry.get_model_class("crossfuse") is Crossfuse
    with pytest.raises(ValueError, match="unknown model_args colour"):
        Crossfuse(pretrained="embedded", colour="red")
    with pytest.raises(ValueError, match="either pretrained"):
        Crossfuse()


def xf_record(question, picture):
    from crossfuse.data.records import Record

    return Record.of_question(question, question, images=[picture])
