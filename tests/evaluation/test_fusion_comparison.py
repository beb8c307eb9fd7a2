"""Fusions from one start with equal budgets: rows, plans, costs, and a comparison that is killed and gone on with."""

import copy
import json

import pytest
import torch

import crossfuse as xf
from crossfuse.data.collate import Collator
from crossfuse.evaluation.contenders import PAPER, build_fusion, chosen_contenders, contenders
from crossfuse.evaluation.fusion_comparison import Job, begin, jobs, work
from crossfuse.evaluation.fusion_runs import Plan
from crossfuse.evaluation.step_cost import StepCost, step_cost
from crossfuse.evaluation.training_mix import training_mix
from crossfuse.fusion import FUSIONS
from crossfuse.reports.run_report import write_report

SMALL = Plan(samples=8, batch_size=4, tasks=("scenes",), limits=(10,), answer_batch=10)


def test_every_registered_fusion_has_a_row():
    assert {fields["name"] for fields in contenders().values()} == set(FUSIONS)
    assert set(PAPER) <= set(contenders())
    assert list(chosen_contenders("CA,insertion")) == ["CA", "insertion"]
    assert chosen_contenders("paper").keys() == PAPER.keys()
    with pytest.raises(ValueError, match=r"unknown fusion 'CA_tv' \(did you mean 'CA_t\+v'\?\)"):
        chosen_contenders("CA_tv")


def test_anchors_copy_their_share_of_the_training_prompts():
    model, processor = xf.load_embedded("start")
    data = training_mix(32, seed=0)
    prompts = [Collator(processor, prompt_only=True)(list(data))]
    fusion = build_fusion(PAPER["text-anchors"], model, prompts)
    assert xf.fusion_of(model) is None
    found = xf.calibrate_threshold(model, prompts, share=0.1)
    assert (fusion.threshold, fusion.share) == (found.threshold, 0.1)


def test_one_budget_and_as_many_steps_as_fit_in_it():
    cost = StepCost(cpu_seconds=0.5, operations=4_000, activation_bytes=1, samples=16)
    assert Plan(samples=100, batch_size=16).steps(cost) == 6
    assert Plan(samples=None, seconds=7.6).steps(cost) == 15
    assert Plan(samples=None, operations=9e3).steps(cost) == 2
    with pytest.raises(ValueError, match="one budget"):
        Plan(samples=10, seconds=1.0)


def test_training_questions_depend_on_seed_and_index_alone():
    long, short = training_mix(10**9, seed=1), training_mix(6, seed=1)
    assert [r.model_dump_json() for r in long[:6]] == [r.model_dump_json() for r in short]
    assert training_mix(6, seed=2)[0].model_dump_json() != short[0].model_dump_json()
    assert [m.role for m in training_mix(4, seed=1, questions=3)[0].messages[:4]] == ["user", "assistant"] * 2
    with pytest.raises(ValueError, match="test questions are the tasks"):
        training_mix(1, seed=0, split="test")


def test_operations_of_a_step_are_three_times_the_forward_of_what_is_trained():
    """Backward of a product is two products; the frozen tower has none, so the step lies between two and three."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, processor = xf.load_embedded("start")
    xf.fuse(model, xf.Insertion())
    batch = Collator(processor)(list(training_mix(4, seed=0)))
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(**batch, use_cache=False, return_logits=False)
    model.model.vision_tower.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    cost = step_cost(copy.deepcopy(model), [batch, batch])
    forward = counter.get_total_flops()
    assert 2 * forward < cost.operations < 3 * forward
    assert cost.activation_bytes > 0
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_comparison_goes_on_where_it_stopped(tmp_path):
    rows = chosen_contenders("insertion,CA,circle-rope")
    begin(tmp_path, SMALL)
    todo = jobs(rows, 1, tmp_path)
    said = []

    def stop_after_training(job: Job, stage: str, done: int, of: int) -> None:
        if job.name == "CA" and stage != "training":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(todo, SMALL, progress=stop_after_training, say=said.append)
    assert [job.state(SMALL) for job in todo] == ["done", "open", "open"]
    trained = json.loads((todo[1].directory / "training.json").read_text())
    assert (trained["steps"], trained["samples"]) == (2, 8)
    said.clear()
    assert work(todo, SMALL, progress=lambda *a: None, say=said.append) == []
    assert [job.state(SMALL) for job in todo] == ["done", "done", "failed"]
    assert not any("insertion" in line for line in said)
    assert json.loads((todo[1].directory / "training.json").read_text()) == trained
    with pytest.raises(ValueError, match="holds a comparison with samples = 8, this one has 16"):
        begin(tmp_path, Plan(samples=16, batch_size=4, tasks=("scenes",), limits=(10,), answer_batch=10))
    write_report([tmp_path], tmp_path, baseline=None, published="all", resamples=100, command="x")
    page = (tmp_path / "report.html").read_text()
    for text in ("Parameters, time and memory", "Not run", "circle-rope needs positions", "Training"):
        assert text in page
    costs = {r["model"]: r for r in json.loads((tmp_path / "tables" / "costs.json").read_text())["rows"]}
    assert costs["CA"]["cache KiB 4 images"] < costs["insertion"]["cache KiB 4 images"] / 3
    assert costs["CA"]["of the fusion"] > costs["insertion"]["of the fusion"] == 0
