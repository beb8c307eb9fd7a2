"""Checkpoints in the layout of a project's own repository, told from their ``config.json`` and refused in words.

Their classes live in those repositories' code, so that newer versions of transformers do not know them either.
"""

from __future__ import annotations

import os
import re
from typing import Any

# Model types of original repositories -> the project.
_FOREIGN = (
    (re.compile(r"tiny_?llava.*"), "TinyLLaVA", ("bczhou/tiny-llava-v1-hf",)),
    (re.compile(r"llava_(llama|mistral|mpt|qwen|phi|gemma).*"), "LLaVA", ("llava-hf/llava-1.5-7b-hf",)),
)


def refuse_foreign_layout(name: str | os.PathLike[str], **options: Any) -> None:
    """ValueError naming checkpoints that work, where ``name`` has a model type that only its own repository knows.

    name: directory or hub id. options: of `from_pretrained`; nothing is refused with ``trust_remote_code=True``, and
    what has no readable ``config.json`` is left to the loader.
    """
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if options.get("trust_remote_code"):
        return
    hub = {k: v for k, v in options.items() if k in ("revision", "cache_dir", "token", "local_files_only", "subfolder")}
    try:
        config, _ = PreTrainedConfig.get_config_dict(name, **hub)
    except (OSError, ValueError):
        return
    kind = str(config.get("model_type", ""))
    # Their folders are named model_type=llava too; the class then says whose it is.
    architecture = next(iter(config.get("architectures") or ()), "")
    if kind == "llava" and architecture.startswith("Llava") and architecture != "LlavaForConditionalGeneration":
        kind = "llava_llama"
    if kind in CONFIG_MAPPING:
        return
    for pattern, project, working in _FOREIGN:
        if pattern.fullmatch(kind):
            raise ValueError(
                f"{name} is in the layout of {project}'s own repository (model type {config['model_type']!r}), whose "
                f"classes transformers does not have; use a checkpoint in transformers' layout, such as "
                f"{', '.join(working)}, or convert it to LlavaForConditionalGeneration"
            )
