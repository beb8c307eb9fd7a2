"""The command line as a user meets it: fast help, one-line errors with the value and the remedy, exit codes."""

import os
import subprocess
import sys

import pytest


def one_line(err: str) -> str:
    """The only line of an error message, without the name of the program."""
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("crossfuse: ")
    return lines[0].removeprefix("crossfuse: ")


def test_help_names_every_command_and_loads_no_torch():
    code = (
        "import sys, crossfuse.cli.main as m\n"
        "try: m.main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'numpy', 'pydantic', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    # The CPU time of the child, not its wall time: other tests may share the cores.
    before = os.times()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert {"demo", "generate", "info"} <= set(done.stdout.split())
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0


def test_module_and_command_are_the_same():
    done = subprocess.run([sys.executable, "-m", "crossfuse", "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("crossfuse ")


def test_no_arguments_show_the_help(run):
    code, out, err = run()
    assert "generate" in out + err
    assert code in (0, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gnerate"], "No such command 'gnerate'"),
        (["demo", "--dat", "scenes"], "No such option: --dat"),
        (["demo", "--data", "coco"], "'coco' is not one of 'scenes', 'easy-vqa'"),
        (["generate", "image.png"], "Missing argument 'PROMPT'"),
    ],
)
def test_usage_errors(run, arguments, message):
    code, _, err = run(*arguments)
    assert code == 2
    assert message in one_line(err)


def test_internal_errors_are_told_apart_and_debug_shows_the_trace(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("the fault")

    monkeypatch.setattr("crossfuse.loading.check_source", broken)
    code, _, err = run("info", "x/y")
    assert code == 1
    assert one_line(err) == "internal error: RuntimeError: the fault (--debug shows where)"
    for arguments in (("--debug", "info", "x/y"), ("info", "x/y", "--debug")):
        code, _, err = run(*arguments)
        assert code == 1
        assert "Traceback" in err
        assert "in broken" in err


def test_debug_shows_the_trace_of_a_mistake_too(run):
    code, _, err = run("info", "/no/such/directory", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("crossfuse: no such directory: /no/such/directory")


def test_faults_that_pydantic_finds_are_told_in_one_line(run, monkeypatch):
    from crossfuse.training.recipe import Recipe

    monkeypatch.setattr("crossfuse.loading.check_source", lambda _: Recipe(steps=0))
    code, _, err = run("info", "x/y")
    assert code == 2
    assert one_line(err) == "steps: Input should be greater than or equal to 1"
    monkeypatch.setattr("crossfuse.loading.check_source", lambda _: Recipe(step=1))
    _, _, err = run("info", "x/y")
    assert one_line(err).startswith("a recipe has no field 'step' (did you mean 'steps'?)")
