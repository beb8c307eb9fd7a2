"""Public benchmarks by name: loaders of their published files and their scoring rules."""

from __future__ import annotations

from crossfuse.evaluation.benchmarks.amber import AMBER
from crossfuse.evaluation.benchmarks.amber_generative import AMBER_GENERATIVE
from crossfuse.evaluation.benchmarks.base import Benchmark, BenchmarkSample, Metric
from crossfuse.evaluation.benchmarks.choice import AI2D, MMBENCH, REAL_WORLD_QA, SCIENCE_QA
from crossfuse.evaluation.benchmarks.documents import CHART_QA, DOC_VQA, INFO_VQA, OCR_BENCH
from crossfuse.evaluation.benchmarks.live_sports import LIVE_SPORTS
from crossfuse.evaluation.benchmarks.nextqa_open import NEXT_QA_OPEN
from crossfuse.evaluation.benchmarks.open_vqa import GQA, TEXT_VQA, VIZ_WIZ, VQA_V2
from crossfuse.evaluation.benchmarks.video import MLVU, MV_BENCH, NEXT_QA, PERCEPTION_TEST, VIDEO_MME
from crossfuse.evaluation.benchmarks.yes_no import HALLUSION_BENCH, MME, POPE
from crossfuse.fusion import nearest

BENCHMARKS: dict[str, Benchmark] = {
    each.name: each
    for each in (
        *(POPE, AMBER, AMBER_GENERATIVE, HALLUSION_BENCH, MME, MMBENCH, VQA_V2, GQA, SCIENCE_QA, VIZ_WIZ),
        *(DOC_VQA, INFO_VQA, CHART_QA, TEXT_VQA, OCR_BENCH, REAL_WORLD_QA, AI2D),
        *(MV_BENCH, VIDEO_MME, PERCEPTION_TEST, NEXT_QA, NEXT_QA_OPEN, MLVU, LIVE_SPORTS),
    )
}


def benchmark(name: str) -> Benchmark:
    """The benchmark of that name. Raises ValueError with the nearest name."""
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}{nearest(name, BENCHMARKS)}; known: {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


__all__ = ["BENCHMARKS", "Benchmark", "BenchmarkSample", "Metric", "benchmark"]
