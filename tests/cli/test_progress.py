"""Progress bars: rate and time left on a terminal, nothing but the findings elsewhere."""

import io

from rich.console import Console

from crossfuse.cli.progress import Stages


def shown(*, terminal: bool) -> str:
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=100)
    with Stages(console) as stages, stages.stage("training", 4) as progress:
        for _ in range(4):
            progress(1)
        stages.say("4 steps done")
    return output.getvalue()


def test_only_findings_reach_a_file():
    assert shown(terminal=False) == "4 steps done\n"


def test_a_terminal_sees_the_stage_and_its_count():
    text = shown(terminal=True)
    assert "training" in text
    assert "4/4" in text
    assert "4 steps done" in text
