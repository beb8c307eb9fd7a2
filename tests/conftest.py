"""One thread, no network, and the folder of the tests on the path (`tiny`, `matrix`, `oracles`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _same_seed():
    """Whatever a test draws without a generator of its own does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def embedded():
    """(model, processor) of the model inside the package. Tests copy the model before they change it."""
    import crossfuse as xf

    return xf.load_embedded()


@pytest.fixture
def run(capsys):
    """Run a command line in this process: (exit code, standard output, standard error)."""
    from crossfuse.cli import main as cli

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main(list(arguments))
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call
