"""`crossfuse explain`: what anchors do inside a model, and whether they can help on its data."""

from __future__ import annotations

import dataclasses
import io
import itertools
from pathlib import Path
from typing import Annotated, Any

import typer

from crossfuse.cli.model_options import OneDeviceOption


def explain(
    model: Annotated[
        str, typer.Argument(help="Directory or hub id; `embedded` for the model of the package.", metavar="MODEL")
    ],
    data: Annotated[str, typer.Argument(help="JSON lines of records, or `scenes` (rendered).", metavar="DATA")],
    out: Annotated[Path, typer.Option("--out", help="Directory for explain.json and the charts.")] = Path(
        "crossfuse-explain"
    ),
    threshold: Annotated[
        float | None, typer.Option(help="τ; by default the model's own, else calibrated to --share.")
    ] = None,
    share: Annotated[float, typer.Option(help="Share of prompt tokens to copy where no τ is known.")] = 0.10,
    samples: Annotated[int, typer.Option(min=2, help="Records to read.")] = 64,
    attention_samples: Annotated[int, typer.Option(min=1, help="Of these, records whose attention is analysed.")] = 8,
    device: OneDeviceOption = "auto",
) -> None:
    """Measure attention gain, distance bias, mutual information and the three conditions under which anchors fail."""
    from crossfuse.loading import load_model
    from crossfuse.reports.files import write_bytes, write_json

    records = read_data(data, samples)
    network, processor = load_model(model, device, whole=True)
    report, charts = explain_model(network, processor, records, threshold, share, attention_samples)
    for name, png in charts.items():
        write_bytes(out / name, png)
    write_json(out / "explain.json", report | {"model": model, "data": data})
    for line in report["sentences"]:
        typer.echo(line)
    typer.echo(f"written: {', '.join(str(out / name) for name in ['explain.json', *charts])}")


def explain_model(
    network: Any, processor: Any, records: list[Any], threshold: float | None, share: float, attention_samples: int
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """(JSON report with its ``sentences``, PNG charts by file name)."""
    import crossfuse as xf
    from crossfuse.analysis.attention_gain import attention_gain, summarise
    from crossfuse.analysis.diagnose import diagnose
    from crossfuse.analysis.mutual_information import information_change
    from crossfuse.analysis.rope_bias import rope_distance_bias
    from crossfuse.analysis.threshold_fit import draw_threshold_fit, fit_threshold
    from crossfuse.analysis.word_patches import labelled_cosines
    from crossfuse.data.collate import Collator

    known = xf.fusion_of(network)
    if known is not None and not isinstance(known, xf.TextAnchors):
        raise ValueError(
            f"this model was saved with {known}; explain measures TextAnchors on it or on an unfused model"
        )
    batch = Collator(processor, prompt_only=True)(records)
    sentences = []
    used = known or xf.TextAnchors()
    if threshold is not None:
        used = dataclasses.replace(used, threshold=threshold)
    elif known is None:
        calibration = xf.calibrate_threshold(network, [batch], share=share)
        used = dataclasses.replace(used, threshold=calibration.threshold, share=share)
        sentences.append(f"τ = {calibration.threshold:.3f} copies {calibration.achieved:.1%} of the prompt tokens.")
    if known is not None:
        xf.unfuse(network)
    diagnosis = diagnose(network, processor, records, used.threshold, attention_samples=attention_samples)
    sentences += [f"{'✗' if f.met else '✓'} {f.name}: {f.sentence}" for f in diagnosis.findings]
    report: dict[str, Any] = {"fusion": used.to_dict(), "diagnosis": dataclasses.asdict(diagnosis)}
    charts = {}
    if diagnosis.precision is not None:
        found = diagnosis.precision
        low, high = found.interval
        sentences.append(
            f"A naming word's best patch shows what it names in {found.precision:.1%} [{low:.1%}, {high:.1%}] of "
            f"{found.words} "
            f"cases, with shuffled images in {found.shuffled_hits / found.words:.1%}, by chance in {found.chance:.1%}."
        )
        cosines, related = labelled_cosines(network, processor, records, batch)
        fit = fit_threshold(cosines, related)
        charts["threshold.png"] = draw_threshold_fit(fit, cosines, related)
        report["threshold_fit"] = {
            name: value for name, value in dataclasses.asdict(fit).items() if not name.endswith("_curve")
        } | {"separation": fit.separation}
        sentences.append(
            f"Related and unrelated pairs lie {fit.separation:.2f} σ apart; F1 is highest at τ* = "
            f"{fit.empirical.threshold:.3f} "
            f"({fit.by_fit.threshold:.3f} by the fit): precision {fit.empirical.precision:.1%}, recall "
            f"{fit.empirical.recall:.1%}."
        )
    xf.fuse(network, used)
    gains, changes = [], []
    for record in itertools.islice((r for r in records if len(r.images) == 1), attention_samples):
        single = Collator(processor, prompt_only=True)([record])
        gains += attention_gain(network, single)
        changes.append(information_change(network, single))
    xf.unfuse(network)
    if known is not None:
        xf.fuse(network, known)
    summary = summarise(gains)
    report["attention_gain"] = None if summary is None else dataclasses.asdict(summary)
    report["mutual_information"] = [dataclasses.asdict(change) for change in changes]
    if summary is not None:
        sentences.append(
            f"Layer 0, {summary.anchors} anchors: a copy stands {summary.distance_copy:.1f} positions from its "
            f"image token, the "
            f"original {summary.distance_without:.1f}; its score is higher in {summary.closer_scores_higher:.0%} "
            f"of the heads; "
            f"the median gain is {summary.median_gain:.3f} (bound {summary.median_bound:.3f}, reached in "
            f"{summary.bound_reached:.0%})."
        )
        charts["attention.png"] = _draw_layers(summary)
    mean = {name: sum(getattr(c, name) for c in changes) / len(changes) for name in ("global_without", "global_with")}
    local = [c for c in changes if c.local_with is not None and c.local_without is not None]
    without, with_anchors = mean["global_without"], mean["global_with"]
    sentence = f"Mutual information of text and image: {without:.4f} nats without, {with_anchors:.4f} with anchors"
    if local:
        before, after = (sum(getattr(c, n) for c in local) / len(local) for n in ("local_without", "local_with"))
        sentence += f"; around the anchors {before:.4f} without, {after:.4f} with"
    sentences.append(sentence + ".")
    distances = [*range(33), *range(40, 1025, 8)]
    bias = rope_distance_bias(network, distances)
    report["rope_distance_bias"] = {"distances": distances} | {k: v.tolist() for k, v in bias.items()}
    charts["distance_bias.png"] = _draw_bias(distances, bias)
    report["sentences"] = sentences
    return report, charts


def read_data(data: str, count: int, split: str = "test") -> list[Any]:
    """The first ``count`` records of a file, or that many rendered questions of a split (``scenes``)."""
    if data == "scenes":
        from crossfuse.analysis.word_patches import scene_records

        return list(scene_records(split, count))
    from crossfuse.data.records import read_records

    path = Path(data)
    if not path.is_file():
        raise ValueError(f"no such file: {data}; give JSON lines of records, or `scenes`")
    records = list(itertools.islice(read_records(path, root=path.parent), count))
    if not records:
        raise ValueError(f"{data} holds no record")
    return records


def _draw_layers(summary: Any) -> bytes:
    figure, axes = _figure()
    layers = range(len(summary.layers))
    for n, (name, style) in enumerate(
        (("token, without anchors", "o-"), ("token, with anchors", "s--"), ("its copy", "^-"))
    ):
        axes.plot(layers, [layer[n] for layer in summary.layers], style, label=name)
    axes.set_xlabel("layer")
    axes.set_ylabel("attention to the best image token")
    axes.set_xticks(list(layers))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return _png(figure)


def _draw_bias(distances: list[int], bias: dict[str, Any]) -> bytes:
    figure, axes = _figure()
    for name, values in bias.items():
        axes.plot(distances, values.tolist(), label=name)
    axes.set_xscale("symlog", linthresh=32)
    axes.set_xlabel("distance in positions")
    axes.set_ylabel("mean score of equal vectors")
    axes.axhline(0, color="#999999", linewidth=0.8)
    if len(bias) > 1:
        axes.legend(frameon=False)
    return _png(figure)


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
