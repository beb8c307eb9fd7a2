"""The processor of models with an audio encoder: expands audio placeholders, a delimiter after every clip."""

from __future__ import annotations

from typing import Any

from transformers import ProcessorMixin

from crossfuse.backbones.composed_processor import vision_chat_template, with_delimiters

AUDIO_TOKEN = "<audio>"


class ComposedAudioProcessor(ProcessorMixin):
    """Feature extractor and tokenizer of a composed model; ``processor(text=..., audio=waveforms)``.

    audio_tokens: tokens of one clip. delimiter: text between a clip and whatever follows it; cross-attention predicts a
    token from the text before it, so something must stand between a clip and its answer.
    """

    def __init__(
        self,
        feature_extractor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        audio_tokens: int = 1500,
        audio_token: str = AUDIO_TOKEN,
        delimiter: str = "\n",
        **kwargs: Any,
    ) -> None:
        self.audio_tokens, self.audio_token, self.delimiter = audio_tokens, audio_token, delimiter
        self.audio_token_id = tokenizer.convert_tokens_to_ids(audio_token)
        if chat_template is None:
            chat_template = vision_chat_template(tokenizer.chat_template, audio_token, delimiter, part="audio")
        super().__init__(feature_extractor, tokenizer, chat_template=chat_template)

    def prepare_inputs_layout(self, images: Any = None, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the base class, with the delimiter after every clip of ``text`` that lacks it."""
        images, text, videos, audio = super().prepare_inputs_layout(images, text, *args, **kwargs)
        return images, with_delimiters(text, self.audio_token, self.delimiter), videos, audio

    def replace_audio_token(self, audio_inputs: dict[str, Any], audio_idx: int, **kwargs: Any) -> str:
        return self.audio_token * self.audio_tokens
