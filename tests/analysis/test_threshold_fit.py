"""τ from labelled pairs: the fit recovers known Gaussians, the empirical optimum is a brute-force search's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import crossfuse as xf
from crossfuse.analysis.threshold_fit import corollary, draw_threshold_fit, fit_threshold, measured_quality
from crossfuse.analysis.word_patches import labelled_cosines, scene_records, word_patches
from crossfuse.data.collate import Collator


def drawn(mean_true: float, n: int = 40_000, p: float = 0.1, mean_false: float = 0.02, sigma: float = 0.05):
    draw = torch.Generator().manual_seed(0)
    related = torch.rand(n, generator=draw) < p
    centre = torch.where(related, mean_true, mean_false)
    return centre + sigma * torch.randn(n, generator=draw), related


def test_the_fit_recovers_the_gaussians_that_were_drawn():
    cosines, related = drawn(0.15)
    fit = fit_threshold(cosines, related)
    assert fit.p == pytest.approx(0.1, abs=0.01)
    assert fit.mean_true == pytest.approx(0.15, abs=0.003)
    assert fit.mean_false == pytest.approx(0.02, abs=0.003)
    assert fit.sigma == pytest.approx(0.05, abs=0.001)
    assert fit.n_pairs == 40_000
    assert fit.by_fit.threshold == pytest.approx(fit.empirical.threshold, abs=0.01)
    assert fit.by_fit.f1 == pytest.approx(fit.empirical.f1, abs=0.01)
    for fitted, measured in zip(fit.fitted_curve, fit.measured_curve, strict=True):
        assert fitted.recall == pytest.approx(measured.recall, abs=0.02)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(-5, 5), st.booleans()), min_size=2, max_size=30))
def test_the_empirical_threshold_is_that_of_a_brute_force_search(pairs):
    cosines = torch.tensor([c / 10 for c, _ in pairs])
    related = torch.tensor([r for _, r in pairs])
    if not 0 < int(related.sum()) < len(pairs):
        with pytest.raises(ValueError, match="needs related and unrelated pairs"):
            fit_threshold(cosines, related)
        return
    best = max(measured_quality(cosines, related, t / 20).f1 for t in range(-11, 12))
    assert fit_threshold(cosines, related, points=3).empirical.f1 == pytest.approx(best)


def test_corollary_1_better_embeddings_want_a_higher_threshold():
    weak, strong = (fit_threshold(*drawn(mean)) for mean in (0.08, 0.3))
    found = corollary(weak, strong)
    assert found.separation_after > found.separation_before
    assert found.threshold_after > found.threshold_before
    assert found.holds


def test_the_plot_is_a_png():
    cosines, related = drawn(0.15, n=500)
    assert draw_threshold_fit(fit_threshold(cosines, related), cosines, related).startswith(b"\x89PNG")


def test_words_of_scene_questions_are_found_with_the_patches_of_their_objects(embedded):
    model, processor = embedded
    records = list(scene_records("test", 8))
    batch = Collator(processor, prompt_only=True)(records)
    named = 0
    for row, record in enumerate(records):
        labels = word_patches(processor, record, batch["input_ids"][row], (8, 8))
        words = [processor.tokenizer.decode([i]) for i in labels.token_ids]
        text = record.messages[0].text
        spans = record.meta["spans"]
        assert " ".join(words) == " ".join(dict.fromkeys(text[s["start"] : s["end"]] for s in spans))
        if words:
            named += 1
            assert 0 < labels.chance < 0.5
            for span, shown in zip(spans, labels.shown.view(-1, 8, 8), strict=False):
                side = record.images[0].width / 8
                x, y = (span["box"][0] + span["box"][2]) / 2, (span["box"][1] + span["box"][3]) / 2
                assert shown[min(int(y // side), 7), min(int(x // side), 7)] or len(spans) > 1
    assert named >= 4
    cosines, related = labelled_cosines(model, processor, records, batch)
    assert cosines.shape == related.shape
    assert len(cosines) % 64 == 0
    fit = xf.calibrate_threshold(model, [batch], pairs=[(cosines, related)])
    assert fit == fit_threshold(cosines, related)


def test_share_and_pairs_exclude_each_other(embedded):
    with pytest.raises(ValueError, match="give share or pairs, not both"):
        xf.calibrate_threshold(embedded[0], [], share=0.1, pairs=[])
