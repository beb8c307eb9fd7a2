"""crossfuse as a model of lmms-eval, out of its tree: ``lmms_eval --model crossfuse --model_args pretrained=DIR``.

Only lmms-eval imports this module (entry-point group ``lmms_eval.models``); `lmms_engine` runs its tasks from Python.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lmms_eval.api.model import lmms
from lmms_eval.models.registry_v2 import ModelManifest
from PIL import Image

from crossfuse.data.records import ImagePart, Record, TextPart, VideoPart
from crossfuse.devices import on_device_of
from crossfuse.loading import EMBEDDED


def manifests() -> list[ModelManifest]:
    """What lmms-eval's registry asks for."""
    return [ModelManifest(model_id="crossfuse", simple_class_path="crossfuse.evaluation.lmms_plugin.Crossfuse")]


class Crossfuse(lmms):
    """A model with or without a fusion. Give either `pretrained` or a model and its processor.

    Args:
        pretrained: directory, hub id (fused where ``fusion.json`` lies beside it), or "embedded".
        device: where the model runs, as "cpu" or "cuda:0".
        dtype: as "float32" or "bfloat16"; None keeps the checkpoint's.
        batch_size: requests answered at once.
    """

    is_simple = True

    def __init__(
        self,
        pretrained: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str = 1,
        model: Any = None,
        processor: Any = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        if unknown:
            raise ValueError(f"unknown model_args {', '.join(unknown)}; known: pretrained, device, dtype, batch_size")
        if (pretrained is None) == (model is None):
            raise ValueError(
                "give either pretrained=DIRECTORY (or a hub id, or embedded) or a model with its processor"
            )
        if pretrained is not None:
            model, processor = _load(pretrained, dtype)
        self.model = model.eval() if device is None else model.eval().to(device)
        self.processor = processor
        self.batch_size = int(batch_size)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answers in the order of the requests, cut at their `until` strings."""
        answers: dict[int, str] = {}
        ids = request_ids(requests)
        order = sorted(range(len(requests)), key=lambda i: repr(sorted(requests[i].args[1].items(), key=str)))
        for _, same in itertools.groupby(order, key=lambda i: requests[i].args[1]):
            group = list(same)
            settings = requests[group[0]].args[1]
            asked = Records(self, [(ids[number], requests[number].args) for number in group])
            texts = self._answers(asked, decoding_of(settings))
            answers |= {number: _cut(text, settings) for number, text in zip(group, texts, strict=True)}
        return [answers[number] for number in range(len(requests))]

    def _answers(self, asked: Records, decoding: dict[str, Any]) -> list[str]:
        from crossfuse.evaluation.generation import answer

        return [
            text
            for records in asked.chunks(self.batch_size)
            for text in answer(self.model, self.processor, records, batch_size=self.batch_size, **decoding)
        ]

    @torch.inference_mode()
    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """(mean cross-entropy of the continuation, whether it is the greedy one), as lmms-eval's own models give it."""
        from crossfuse.data.collate import Collator

        collate = Collator(self.processor)
        results = []
        for number, request in enumerate(requests):
            target = request.args[1]
            doc = self.task_dict[request.args[4]][request.args[5]][request.args[3]]
            continuation = target if isinstance(target, str) else target(doc)
            batch = on_device_of(self.model, collate([self._record(str(number), request.args, continuation)]))
            labels = batch.pop("labels")[:, 1:]
            logits = self.model(**batch, use_cache=False).logits[:, :-1].float()
            kept = labels != -100
            loss = torch.nn.functional.cross_entropy(logits[kept], labels[kept])
            results.append((float(loss), bool((logits[kept].argmax(-1) == labels[kept]).all())))
        return results

    def generate_until_multi_round(self, requests: Sequence[Any]) -> list[str]:
        """Not offered: none of the supported benchmarks has several rounds."""
        raise NotImplementedError("crossfuse answers single-round tasks only; choose another task")

    def _record(self, id: str, args: Sequence[Any], answer: str | None = None) -> Record:
        context, _, visual, doc_id, task, split = args[:6]
        found = _flat(visual(self.task_dict[task][split][doc_id]) or [])
        images = [item for item in found if isinstance(item, Image.Image | bytes)]
        videos = [item for item in found if isinstance(item, str)]
        if len(images) + len(videos) < len(found):
            kinds = {type(item).__name__ for item in found} - {"str", "bytes"}
            raise ValueError(f"task {task} gives {', '.join(sorted(kinds))}; crossfuse takes images and video paths")
        parts = [ImagePart() for _ in images] + [VideoPart() for _ in videos] + [TextPart(text=context)]
        messages: list[dict[str, Any]] = [{"role": "user", "content": parts}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        fields = {"id": id, "images": images, "videos": videos, "messages": messages}
        return Record.model_validate(fields)


class Records:
    """Records of requests, made chunk by chunk: the pictures of a whole task would fill the memory."""

    def __init__(self, engine: Crossfuse, requests: Sequence[tuple[str, Sequence[Any]]]) -> None:
        self._engine = engine
        self._requests = requests

    def chunks(self, batch_size: int) -> Iterator[list[Record]]:
        """In their order, a few batches at once (batches hold samples of like length)."""
        size = 16 * batch_size
        for start in range(0, len(self._requests), size):
            yield [self._engine._record(id, args) for id, args in self._requests[start : start + size]]


def request_ids(requests: Sequence[Any]) -> list[str]:
    """ "TASK/NUMBER" of each request, with "/1", "/2" for those that are asked several times."""
    turns: Counter[str] = Counter()
    ids = []
    for request in requests:
        _, _, _, doc_id, task = request.args[:5]
        name = f"{task}/{doc_id}"
        ids.append(f"{name}/{turns[name]}" if turns[name] else name)
        turns[name] += 1
    return ids


def _load(name: str, dtype: str | None) -> tuple[Any, Any]:
    import crossfuse as xf

    if name in EMBEDDED:
        return xf.load_embedded(EMBEDDED[name])
    from transformers import AutoProcessor

    return xf.from_pretrained(name, **({} if dtype is None else {"dtype": dtype})), AutoProcessor.from_pretrained(name)


def decoding_of(settings: dict[str, Any]) -> dict[str, Any]:
    """lmms-eval's generation settings in transformers' terms: temperature 0 means greedy."""
    temperature = float(settings.get("temperature") or 0)
    decoding: dict[str, Any] = {
        "max_new_tokens": int(settings.get("max_new_tokens", 1024)),
        "num_beams": int(settings.get("num_beams") or 1),
    }
    if temperature > 0:
        decoding |= {"do_sample": True, "temperature": temperature, "top_p": settings.get("top_p") or 1.0}
    return decoding


def _cut(text: str, settings: dict[str, Any]) -> str:
    until = settings.get("until") or []
    for stop in [until] if isinstance(until, str) else until:
        if stop:
            text = text.split(stop)[0]
    return text


def _flat(items: Sequence[Any]) -> list[Any]:
    def walk(value: Any) -> Iterator[Any]:
        if isinstance(value, list | tuple):
            for item in value:
                yield from walk(item)
        else:
            yield value

    return list(walk(items))
