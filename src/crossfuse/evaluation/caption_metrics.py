"""METEOR 1.5 and CIDEr-D by pycocoevalcap, whose jars need Java, guarded against all that stops them.

Java missing, of the wrong version or hung, a caption with a line break, "|||" or nothing in it: none of these ends the
run or shifts the scores of other captions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from crossfuse.evaluation.benchmarks.base import Metric
from crossfuse.evaluation.text_metrics import CIDER_NEEDS, version

METEOR = "METEOR 1.5, English, -norm, corpus score, after the PTB tokenizer"
CIDER = "CIDEr-D (n = 4, sigma = 6), after the PTB tokenizer; document frequencies from these references"
CIDER_SIMPLE = (
    "CIDEr-D (n = 4, sigma = 6), words in lower case by a plain split (no Java); not comparable with published scores"
)
# What the COCO caption code drops after tokenising.
_MARKS = "'' ' `` ` -LRB- -RRB- -LCB- -RCB- -lrb- -rrb- -lcb- -rcb- . ? ! , : - -- ... ;"
_DROPPED = frozenset(_MARKS.split())


def meteor(predictions: Sequence[str], references: Sequence[Sequence[str]], timeout: float = 600.0) -> Metric:
    """Corpus METEOR (Denkowski and Lavie 2014). `RuntimeError` with the cause where Java does not answer."""
    value, _ = meteor_scores(predictions, references, timeout)
    return Metric(value, len(predictions), METEOR, "0-1", version("pycocoevalcap"))


def meteor_scores(
    predictions: Sequence[str], references: Sequence[Sequence[str]], timeout: float = 600.0
) -> tuple[float, list[float]]:
    """(corpus score, score of each caption); the corpus score is not their mean."""
    words, known = _ptb(predictions, references, timeout)
    from pycocoevalcap.meteor.meteor import Meteor

    scorer = Meteor()
    stop = threading.Timer(timeout, scorer.meteor_p.kill)  # a read from a killed process ends at once
    stop.start()
    try:
        value, scores = scorer.compute_score(_by_id(known), _by_id([[text] for text in words]))
    except (ValueError, OSError) as error:
        scorer.lock.release()  # the library's destructor waits for it
        scorer.meteor_p.kill()
        said = scorer.meteor_p.stderr.read().decode(errors="replace").strip().splitlines()
        cause = said[-1] if said else f"no reply within {timeout:g} s" if not stop.is_alive() else str(error)
        raise RuntimeError(f"METEOR's Java process failed: {cause}") from error
    finally:
        stop.cancel()
        for stream in (scorer.meteor_p.stdout, scorer.meteor_p.stderr):
            stream.close()
    return float(value), [float(score) for score in scores]


def cider(predictions: Sequence[str], references: Sequence[Sequence[str]], timeout: float = 600.0) -> Metric:
    """CIDEr-D (Vedantam et al. 2015) as COCO's caption code computes it: 0 to 10, the mean over images."""
    words, known = _ptb(predictions, references, timeout)
    return _cider(words, known, CIDER)


def cider_simple(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> Metric:
    """CIDEr-D on a plain split into words, where Java is absent."""
    return _cider(
        [_plain(text) for text in predictions], [[_plain(t) for t in texts] for texts in references], CIDER_SIMPLE
    )


def _cider(words: list[str], known: list[list[str]], variant: str) -> Metric:
    from pycocoevalcap.cider.cider import Cider

    value, _ = Cider().compute_score(_by_id(known), _by_id([[text] for text in words]))
    reason = None
    if len(words) == 1:
        reason = "always 0 for one image: the weights come from how many images' references hold a word"
    elif len(words) < CIDER_NEEDS:
        reason = f"document frequencies from {len(words)} images only; the score depends on how many there are"
    return Metric(float(value), len(words), variant, "0-10", version("pycocoevalcap"), reason)


def _ptb(
    predictions: Sequence[str], references: Sequence[Sequence[str]], timeout: float
) -> tuple[list[str], list[list[str]]]:
    """All texts through Stanford's PTB tokenizer (in pycocoevalcap's wheel), in lower case, without punctuation.

    One process for all texts; the texts go through a file of our own, since the library writes into its own folder.
    """
    java = shutil.which("java")
    if java is None:
        raise RuntimeError("needs Java, and there is no java on the PATH (install a JRE, as default-jre-headless)")
    import pycocoevalcap.tokenizer.ptbtokenizer as library

    jar = Path(library.__file__).with_name(library.STANFORD_CORENLP_3_4_1_JAR)
    # "|||" separates the fields of METEOR's protocol.
    texts = [_bare(text) for text in (*predictions, *(text for each in references for text in each))]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "captions.txt"
        source.write_text("\n".join(texts) + "\n", encoding="utf-8")
        tool = "edu.stanford.nlp.process.PTBTokenizer"
        command = [java, "-cp", str(jar), tool, "-preserveLines", "-lowerCase", str(source)]
        try:
            run = subprocess.run(command, capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"the PTB tokenizer's Java process gave no reply within {timeout:g} s") from error
    lines = run.stdout.decode("utf-8", errors="replace").splitlines()
    if run.returncode or len(lines) != len(texts):
        said = run.stderr.decode(errors="replace").strip().splitlines()
        raise RuntimeError(
            f"the PTB tokenizer's Java process failed: {said[-1] if said else f'{len(lines)} lines for {len(texts)}'}"
        )
    tokens = [" ".join(word for word in line.split() if word not in _DROPPED) for line in lines]
    known, place = [], len(predictions)
    for each in references:
        known.append(tokens[place : place + len(each)])
        place += len(each)
    return tokens[: len(predictions)], known


def _by_id(texts: list[list[str]]) -> dict[int, Any]:
    return dict(enumerate(texts))


def _bare(text: str) -> str:
    """One line without the separator; for nothing a full stop, which is dropped again after tokenising."""
    return " ".join(text.replace("|||", " ").split()) or "."


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+(?:'\w+)?", text.lower()))
