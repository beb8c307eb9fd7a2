"""Options that `evaluate` and `score` share."""

from typing import Annotated

import typer

BertscoreModel = Annotated[str | None, typer.Option(help="Encoder for BERTScore of captions: a directory or a hub id.")]
BertscoreLayers = Annotated[
    int | None, typer.Option(min=1, help="Its layer, where bert-score has no default for the encoder.")
]
