"""Running command lines inside the test process."""

import pytest

from crossfuse.cli import main as cli


@pytest.fixture
def run(capsys):
    """Run a command line in this process: (exit code, standard output, standard error)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            cli.main(list(arguments))
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call
