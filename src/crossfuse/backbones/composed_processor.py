"""The processor of composed models: expands image placeholders and writes a delimiter after every image."""

from __future__ import annotations

import re
from typing import Any

from transformers import ProcessorMixin
from transformers.image_utils import get_image_size, to_numpy_array

IMAGE_TOKEN = "<image>"

# Brings messages with images into the form that templates of text-only LLMs know: content as one string.
_FLATTEN = """{%- set vision = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message['content'] is string -%}
{%- set vision.messages = vision.messages + [message] -%}
{%- else -%}
{%- set written = namespace(text='') -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'PART' -%}{%- set written.text = written.text + 'IMAGE_TOKEN' + DELIMITER -%}
{%- elif part['type'] == 'text' -%}{%- set written.text = written.text + part['text'] -%}{%- endif -%}
{%- endfor -%}
{%- set vision.messages = vision.messages + [dict(message, content=written.text)] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = vision.messages -%}
"""
_PLAIN = """{%- for message in messages -%}
{{- message['role'] + ': ' + message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"""


def vision_chat_template(
    template: str | None, image_token: str = IMAGE_TOKEN, delimiter: str = "\n", part: str = "image"
) -> str:
    """The chat template of a text-only LLM (or a plain one), made to take messages that hold images (or another
    ``part``)."""
    flatten = _FLATTEN.replace("IMAGE_TOKEN", image_token).replace("DELIMITER", repr(delimiter))
    return flatten.replace("PART", part) + (template or _PLAIN)


def with_delimiters(text: Any, token: str, delimiter: str) -> Any:
    """Texts with the delimiter behind every run of placeholders that lacks it."""
    if not isinstance(text, list) or not delimiter:
        return text
    placeholder, wanted = re.escape(token), re.escape(delimiter)
    missing = re.compile(f"({placeholder})(?!{wanted}|{placeholder})")
    return [missing.sub(lambda m: m[1] + delimiter, sample) for sample in text]


class ComposedProcessor(ProcessorMixin):
    """Image processor and tokenizer of a composed model.

    patch_size: side of the square that one image token covers, in pixels; None where the image processor gives
        ``image_grid_thw`` (Qwen2.5-VL's). delimiter: text between an image and whatever follows it. Cross-attention
    predicts a token from the text before it, so something must stand between an image and its answer.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        patch_size: int | None = None,
        image_token: str = IMAGE_TOKEN,
        delimiter: str = "\n",
        **kwargs: Any,
    ) -> None:
        self.patch_size, self.delimiter = patch_size, delimiter
        self.image_token = image_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        if chat_template is None:
            chat_template = vision_chat_template(tokenizer.chat_template, image_token, delimiter)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    @classmethod
    def for_model(cls, model: Any, tokenizer: Any, image_processor: Any, **kwargs: Any) -> ComposedProcessor:
        """The processor that fits a composed ``model``; ValueError where the tokenizer lacks its placeholder."""
        token = tokenizer.convert_ids_to_tokens(model.config.image_token_id)
        if token is None:
            raise ValueError(
                f"the tokenizer has no token {model.config.image_token_id}, the model's image placeholder; pass "
                "tokenizer= to VisionLanguageModel.compose, which adds it"
            )
        return cls(image_processor, tokenizer, patch_size=model.config.image_stride, image_token=str(token), **kwargs)

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the base class, with the delimiter after every image of ``text`` that lacks it."""
        images, text, videos, audio = super().prepare_inputs_layout(images, text, *args, **kwargs)
        return images, with_delimiters(text, self.image_token, self.delimiter), videos, audio

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **kwargs: Any) -> str:
        if "image_grid_thw" in image_inputs:
            patches = int(image_inputs["image_grid_thw"][image_idx].prod())
            return self.image_token * (patches // self.image_processor.merge_size**2)
        if self.patch_size is None:
            raise ValueError(
                "patch_size is None, so image tokens cannot be counted; build the processor with for_model"
            )
        height, width = get_image_size(to_numpy_array(image_inputs["pixel_values"][image_idx]))
        return self.image_token * ((height // self.patch_size) * (width // self.patch_size))
