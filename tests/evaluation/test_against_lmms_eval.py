"""Our scores equal lmms-eval's own functions on the golden files (where lmms-eval is installed)."""

from __future__ import annotations

import copy
import importlib
import json
from types import SimpleNamespace

import pytest
from golden_files import GOLDEN, directory, expected

from crossfuse.evaluation.benchmarks import benchmark
from crossfuse.evaluation.benchmarks.files import rows
from crossfuse.evaluation.vqa_accuracy import CONTRACTIONS, evalai

pytest.importorskip("lmms_eval", reason="lmms-eval is not installed")


def utils(path):
    return importlib.import_module(f"lmms_eval.tasks.{path}")


@pytest.fixture
def golden(tmp_path):
    def load(name):
        wanted = expected(name)
        samples = benchmark(name).load(directory(name, tmp_path), wanted["split"])
        answers = wanted["answers"]
        return samples, answers, benchmark(name).score(answers, samples)

    return load


def same(ours, theirs, scale=100.0):
    assert ours.value == pytest.approx(scale * float(theirs), abs=1e-9)


def test_pope(golden):
    samples, answers, ours = golden("pope")
    lmms = utils("pope.utils")
    found = [
        lmms.pope_process_results({"answer": s.reference["answer"], "question_id": 0}, [answers[s.record.id]])[
            "pope_f1_score"
        ]
        for s in samples
    ]
    for name in ("accuracy", "precision", "recall", "yes_ratio"):
        same(ours[f"{name}@lmms-eval"], getattr(lmms, f"pope_aggregate_{name}")(found))
    same(ours["f1@lmms-eval"], lmms.pope_aggregate_f1_score(found))


def test_mme(golden):
    samples, answers, ours = golden("mme")
    lmms = utils("mme.utils")
    found = {"mme_perception_score": [], "mme_cognition_score": []}
    for s in samples:
        doc = {"answer": s.reference["answer"], "category": s.reference["task"], "question_id": s.reference["image"]}
        for key, value in lmms.mme_process_results(doc, [answers[s.record.id]]).items():
            found[key].append(value)
    for part in ("perception", "cognition"):
        same(ours[f"{part}@official"], lmms.mme_aggregate_results(found[f"mme_{part}_score"]), 1)


def test_hallusionbench(golden):
    samples, answers, ours = golden("hallusionbench")
    lmms = utils("hallusion_bench.evaluate_hb")
    table = rows(GOLDEN / "hallusionbench" / "HallusionBench.json")
    results = [row | {"model_prediction": answers[s.record.id]} for row, s in zip(table, samples, strict=True)]
    for name in ("aAcc", "qAcc", "fAcc"):
        same(ours[f"{name}@lmms-eval"], lmms.hb_aggregation_result_intern(copy.deepcopy(results), name))


def test_mmbench(golden):
    samples, answers, ours = golden("mmbench")
    evaluator = utils("mmbench.mmbench_evals").MMBench_Evaluator()
    results = [_mmbench_row(s, answers) for s in samples]
    same(ours["circular@lmms-eval"], evaluator.eval_result(results, eval_method="static")[0])
    vanilla = [row for row in results if row["index"] < 1_000_000]
    same(ours["vanilla@lmms-eval"], evaluator.eval_result(vanilla, eval_method="static")[0])


def _mmbench_row(s, answers):
    options = dict(zip("ABCD", [*s.reference["options"], None, None], strict=False))
    fields = {"question": "?", "answer": s.reference["answer"], "prediction": answers[s.record.id], "category": "x"}
    return {"index": int(s.record.id), "l2-category": "y", **fields, **options}


def test_vqav2_and_its_contractions(golden):
    samples, answers, ours = golden("vqav2")
    lmms = utils("vqav2.utils")
    found = []
    for s in samples:
        people = [{"answer": a, "answer_id": k} for k, a in enumerate(s.reference["answers"])]
        doc = {"answers": people, "question_id": 1}
        found.append(lmms.vqav2_process_results_val(doc, [answers[s.record.id]])["exact_match"])
    same(ours["accuracy"], sum(found) / len(found))
    table = utils("_task_utils.vqa_eval_metric").EvalAIAnswerProcessor.CONTRACTIONS
    wanted = {key: value for key, value in table.items() if key != value and key == key.lower()}
    assert {key: value for key, value in CONTRACTIONS.items() if key != value} == wanted


@pytest.mark.parametrize(
    "text",
    [
        "", "A dog!", "it's 1,000.50 (approx.)", "Dont know", "twas the 3 boys' hats; red/blue", "none", "Ten. Two",
        "a.b.c", "youre  y'allll", "12:30 p.m.", "what?!", "-5", "1, 2, 3", "...", "the the the",
    ],
)  # fmt: skip
def test_evalai_processing(text):
    assert evalai(text) == utils("_task_utils.vqa_eval_metric").EvalAIAnswerProcessor()(text)


@pytest.mark.parametrize(("name", "module"), [("vizwiz", "vizwiz_vqa.utils"), ("textvqa", "textvqa.utils")])
def test_ten_answer_sets(name, module, golden):
    samples, answers, ours = golden(name)
    process = getattr(utils(module), f"{module.split('.')[0]}_process_results")
    found = [
        process({"answers": list(s.reference["answers"]), "question_id": 1}, [answers[s.record.id]])["exact_match"]
        for s in samples
    ]
    same(ours["accuracy"], sum(found) / len(found))


def test_gqa(golden):
    from lmms_eval.api.metrics import exact_match_hf_evaluate

    samples, answers, ours = golden("gqa")
    said, truth = [answers[s.record.id] for s in samples], [s.reference["answer"] for s in samples]
    theirs = exact_match_hf_evaluate(said, truth, ignore_case=True, ignore_punctuation=True)
    same(ours["accuracy"], theirs["exact_match"])


def test_scienceqa(golden):
    samples, answers, ours = golden("scienceqa")
    lmms = utils("scienceqa.utils")
    found = {}
    for s in samples:
        doc = {"choices": s.reference["options"], "answer": "ABCDE".index(s.reference["answer"])}
        found[s.record.id] = lmms.sqa_process_results(doc, [answers[s.record.id]])["exact_match"]
    same(ours["all@lmms-eval"], sum(found.values()) / len(found))
    pictured = [found[s.record.id] for s in samples if s.reference["image"]]
    same(ours["image@lmms-eval"], sum(pictured) / len(pictured))


@pytest.mark.parametrize("name", ["docvqa", "infovqa"])
def test_anls(name, golden):
    from lmms_eval.api.metrics import anls

    samples, answers, ours = golden(name)
    found = [anls(s.reference["answers"], [answers[s.record.id]])["anls"] for s in samples]
    same(ours["anls"], sum(found) / len(found))


def test_chartqa(golden):
    samples, answers, ours = golden("chartqa")
    lmms = utils("chartqa.utils")
    found = [lmms.relaxed_correctness(answers[s.record.id], s.reference["answer"]) for s in samples]
    same(ours["relaxed"], sum(found) / len(found))


def test_ocrbench(golden, tmp_path):
    samples, answers, ours = golden("ocrbench")
    lmms = utils("ocrbench.utils")
    for key in lmms.OCRBench_score:  # their counts are a module global: a second call would add to the first
        lmms.OCRBench_score[key] = 0
    found = []
    for s in samples:
        r = s.reference
        doc = {"answer": r["answers"], "dataset": r["dataset"], "question_type": r["type"]}
        found.append(lmms.ocrbench_process_results(doc, [answers[s.record.id]])["ocrbench_accuracy"])
    same(ours["score"], lmms.ocrbench_aggregate_accuracy(found, SimpleNamespace(output_path=str(tmp_path))), 1000)


def test_realworldqa(golden):
    samples, answers, ours = golden("realworldqa")
    lmms = utils("realworldqa.utils")
    found = [
        lmms.realworldqa_process_results({"answer": s.reference["answer"]}, [answers[s.record.id]])["exact_match"]
        for s in samples
    ]
    same(ours["accuracy@lmms-eval"], sum(found) / len(found))


def test_ai2d(golden):
    from lmms_eval.api.metrics import exact_match_hf_evaluate

    samples, answers, ours = golden("ai2d")
    read = (
        utils("ai2d.utils")
        .MultiChoiceRegexFilter(regex_pattern=r"([A-Z])\.")
        .apply([[answers[s.record.id]] for s in samples], [{} for _ in samples])
    )
    theirs = exact_match_hf_evaluate(
        read, [s.reference["answer"] for s in samples], ignore_case=True, ignore_punctuation=True
    )
    same(ours["accuracy@lmms-eval"], theirs["exact_match"])


def test_mvbench(golden):
    samples, answers, ours = golden("mvbench")
    lmms = utils("mvbench.utils")
    shares = []
    for task in dict.fromkeys(s.reference["task"] for s in samples):
        found = []
        for s in (s for s in samples if s.reference["task"] == task):
            truth = s.reference["options"]["ABCDE".index(s.reference["answer"])]
            doc = {"candidates": s.reference["options"], "answer": truth}
            found.append(lmms.mvbench_process_results(doc, [answers[s.record.id]])["mvbench_accuracy"])
        shares.append(lmms.mvbench_aggregate_results(found))
    same(ours["accuracy@lmms-eval"], sum(shares) / len(shares), 1)


def test_videomme(golden, tmp_path):
    samples, answers, ours = golden("videomme")
    lmms = utils("videomme.utils")
    table = json.loads(next((GOLDEN / "videomme").rglob("*.parquet.json")).read_text())
    found = [
        lmms.videomme_process_results(row, [answers[s.record.id]])["videomme_perception_score"]
        for row, s in zip(table, samples, strict=True)
    ]
    same(ours["accuracy@lmms-eval"], lmms.videomme_aggregate_results(found), 1)


def test_perceptiontest(golden):
    samples, answers, ours = golden("perceptiontest")
    lmms = utils("perceptiontest.val.utils")
    found = []
    for s in samples:
        doc = {"video_name": "x", "question": "?", "answer_id": "ABC".index(s.reference["answer"])}
        found.append(lmms.perceptiontest_val_process_results_mc(doc, [answers[s.record.id]])["accuracy"])
    same(ours["accuracy@lmms-eval"], lmms.perceptiontest_val_aggregate_accuracy(found, None))


def test_mlvu(golden):
    samples, answers, ours = golden("mlvu")
    lmms = utils("mlvu.utils")
    found = []
    for s in samples:
        doc = {"question": s.record.id, "task_type": s.reference["task"], "answer": s.reference["answer"]}
        found.append(lmms.mlvu_process_results(doc, [answers[s.record.id]])["mlvu_percetion_score"])
    same(ours["accuracy@lmms-eval"], lmms.mlvu_aggregate_results_dev(found), 1)


def test_nextqa_where_lmms_eval_does_not_guess(golden, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("nltk.download", lambda *_, **__: None)  # importing their module would ask the network
    samples, answers, _ = golden("nextqa")
    lmms = utils("nextqa.utils")
    for s in samples[:5]:  # the sixth answer names no option: there they draw one at random
        options = {f"a{k}": option for k, option in enumerate(s.reference["options"])}
        doc = options | {"answer": "ABCDE".index(s.reference["answer"])}
        theirs = lmms.nextqa_mc_process_results(doc, [answers[s.record.id]])["exact_match"]
        assert benchmark("nextqa").score(answers, [s])["accuracy"].value == 100 * theirs


@pytest.mark.parametrize(
    ("said", "truth"),
    [
        ("dog", "cat"),
        ("run park", "walk garden"),
        ("the boy", "boy"),
        ("", "dog"),
        ("zzzz dog", "dog"),
        ("eat", "drink water"),
    ],
)
def test_wups(said, truth, monkeypatch, tmp_path):
    from crossfuse.evaluation.benchmarks.wordnet import wordnet, wordnet_directory, wups

    if wordnet_directory() is None:
        pytest.skip("no WordNet database here")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr("nltk.download", lambda *_, **__: None)
    lmms, reader = utils("nextqa.utils"), wordnet(wordnet_directory())
    monkeypatch.setattr(lmms, "wordnet", reader)
    monkeypatch.setattr(lmms, "word_tokenize", str.split)
    for threshold in (0, 0.9):
        assert wups(reader, said.split(), truth.split(), threshold) == pytest.approx(
            lmms.get_wups(said, truth, threshold)
        )


ANSWERS = [
    "B", "(B)", "B.", "b", "A dog", "the best answer is C.", "I choose D", "A or B", "Answer: (C) cat", "Dog",
    "C) x A) y", "D is wrong, B", "", "?", "maybe A. Then B. But C", "(A) and (D).",
    "The correct option is B because A is not", "BAD",
]  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
def test_ranked_and_mvbench_letters(answer):
    from crossfuse.evaluation.foreign_rules import mme_yes_no, mvbench_letter, ranked_letter

    theirs = utils("_task_utils.mcq_extract").extract_mcq_answer(answer, choices=["A", "B", "C", "D"])
    assert (ranked_letter(answer, "ABCD") or "") == theirs
    for truth in "ABCD":
        assert (mvbench_letter(answer) == truth) == bool(utils("mvbench.utils").mcq_acc(truth, answer))
    for text in (answer, f"Yes {answer}", f"no{answer}", "y", "n", "Not", f" {answer} yes"):
        assert (mme_yes_no(text) or "other") == utils("mme.utils").parse_pred_ans(text)
