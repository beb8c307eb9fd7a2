"""The top of a fused model: passes on what the body must know, guards ``generate`` and ``save_pretrained``."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from crossfuse.devices import device_of
from crossfuse.prompt import (
    answer_starts,
    check_generation_prompt,
    check_pixels,
    check_supervision,
    left_pad,
    prompt_before_labels,
)
from crossfuse.streaming.cache import FusionCache
from crossfuse.swap import Swapped


class FusedTop(Swapped):
    """Adds argument names, finds the end of the prompt, guards ``generate`` and ``save_pretrained``."""

    extra_keywords = ("anchor_mask", "prompt_mask", "answer_starts", "segment_ids", "return_logits")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        names = _parameter_names(type(self)._fused_base)
        kwargs.update(zip(names, args, strict=False))
        body, labels = self.model, kwargs.get("labels")  # type: ignore[attr-defined]
        fusion, backbone = body._fusion, body._backbone
        return_logits = kwargs.pop("return_logits", True)
        for name in ("anchor_mask", "prompt_mask", "answer_starts", "segment_ids"):
            if kwargs.get(name) is None:
                kwargs.pop(name, None)
        if not self.training:  # type: ignore[attr-defined]
            for name in backbone.raw_arguments:
                check_pixels(kwargs.get(name), name)
        if labels is not None and fusion.needs_prompt and "prompt_mask" not in kwargs:
            kwargs["prompt_mask"] = prompt_before_labels(labels, kwargs.get("segment_ids"))
        if labels is not None and fusion.needs_prompt and "answer_starts" not in kwargs:
            kwargs["answer_starts"] = answer_starts(labels)
        if labels is not None and fusion.needs_delimiter and kwargs.get("input_ids") is not None:
            check_supervision(kwargs["input_ids"], labels, kwargs.get("attention_mask"), backbone.placeholder_ids(body))
        if return_logits is False and labels is not None:
            return self._loss_alone(kwargs)
        report: dict[str, Any] = {}
        wanted = kwargs.get("output_hidden_states") or kwargs.get("output_attentions")
        if wanted:
            kwargs["fused_report"] = report
        outputs = super().forward(**kwargs)  # type: ignore[misc]
        if report and hasattr(outputs, "keys"):
            outputs["readout"] = report["readout"]
        return outputs

    def _loss_alone(self, kwargs: dict[str, Any]) -> Any:
        """The loss without logits of rows that have no label; ``logits`` (labelled rows, V) in reading order."""
        body, labels = self.model, kwargs.pop("labels")  # type: ignore[attr-defined]
        following = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        rows = following != -100
        last = getattr(body._backbone.decoder(body), "norm", None)  # its states stand there
        kwargs["logits_to_keep"] = rows.to(device_of(last, rows.device))
        kwargs["return_dict"] = True
        outputs = super().forward(**kwargs)  # type: ignore[misc]
        text_config = self.config.get_text_config()  # type: ignore[attr-defined]
        items = {k: kwargs[k] for k in ("num_items_in_batch",) if kwargs.get(k) is not None}
        outputs["loss"] = self.loss_function(  # type: ignore[attr-defined]
            logits=outputs.logits,
            labels=None,
            shift_labels=following[rows],
            vocab_size=text_config.vocab_size,
            **items,
        )
        outputs.move_to_end("loss", last=False)
        return outputs

    def generate(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        body = self.model  # type: ignore[attr-defined]
        fusion, backbone = body._fusion, body._backbone
        input_ids = kwargs.get("input_ids", inputs)
        if input_ids is not None and kwargs.get("inputs_embeds") is None:
            inputs, kwargs = None, {**kwargs, "input_ids": input_ids}
            if kwargs.get("cache") is None:
                kwargs = left_pad(kwargs)
            for name in backbone.raw_arguments:
                check_pixels(kwargs.get(name), name)
            ids = kwargs["input_ids"]
            if fusion.needs_prompt and not fusion.is_identity and kwargs.get("prompt_mask") is None:
                kwargs["prompt_mask"] = torch.ones_like(ids, dtype=torch.bool)
            chunk = _chunk_size(kwargs, self.generation_config)  # type: ignore[attr-defined]
            if chunk and fusion.compress is not None and not fusion.compress.is_identity:
                raise ValueError(
                    f"prefill_chunk_size={chunk} would cut images before {fusion.compress.name} sees them; use "
                    "prefill_chunk_size=None"
                )
            if chunk and fusion.needs_whole_images(backbone):
                raise ValueError(
                    f"prefill_chunk_size={chunk} would split images, which {fusion} takes as a whole; use None"
                )
            if fusion.needs_delimiter:
                check_generation_prompt(ids, kwargs.get("attention_mask"), backbone.placeholder_ids(body))
        return super().generate(inputs, **kwargs)  # type: ignore[misc]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        body = self.model  # type: ignore[attr-defined]
        fusion = body._fusion
        if fusion.is_identity:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        kind, given = generation_config.cache_implementation, model_kwargs.get("cache")
        if kind not in (None, "dynamic"):
            raise ValueError(f"cache_implementation={kind!r} cannot hold the state of {fusion.name}; use 'dynamic'")
        if given is not None and not isinstance(given, FusionCache):
            raise TypeError(
                f"{type(given).__name__} cannot hold the state of {fusion.name}; use crossfuse.new_cache(model)"
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        made = model_kwargs.get("cache")
        if made is not None and not isinstance(made, FusionCache):
            model_kwargs["cache"] = FusionCache(len(body._backbone.decoder(body).layers))

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        """The positions of a prefill in ``generate`` are those of a forward."""
        made: Tensor = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)  # type: ignore[misc]
        body, ids = self.model, model_kwargs.get("input_ids")  # type: ignore[attr-defined]
        ids = inputs_tensor if ids is None else ids
        if body._fusion.is_identity or made.ndim != 3 or made.shape[-1] != ids.shape[1] or ids.is_floating_point():
            return made
        mask = model_kwargs.get("attention_mask")
        valid = torch.ones_like(ids).bool() if mask is None else mask[:, -ids.shape[1] :].bool()
        return torch.cat([made[:1], body._backbone.mended_positions(body, ids, made[1:], valid)])

    def save_pretrained(
        self, save_directory: Any, *args: Any, state_dict: dict[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """The unfused model in its own format, and ``fusion.safetensors`` + ``fusion.json`` beside it."""
        from crossfuse.storage import fusion_keys, write_fusion

        state = self.state_dict() if state_dict is None else state_dict  # type: ignore[attr-defined]
        new = fusion_keys(self)  # type: ignore[arg-type]
        base = {name: tensor for name, tensor in state.items() if name not in new}
        super().save_pretrained(save_directory, *args, state_dict=base, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", True):
            write_fusion(self, save_directory, {name: state[name] for name in new if name in state})  # type: ignore[arg-type]


def _chunk_size(kwargs: dict[str, Any], default: Any) -> int | None:
    config = kwargs.get("generation_config") or default
    size: int | None = kwargs.get("prefill_chunk_size", getattr(config, "prefill_chunk_size", None))
    return size


@functools.cache
def _parameter_names(base: Any) -> list[str]:
    return list(inspect.signature(base.forward).parameters)[1:]  # type: ignore[attr-defined]
