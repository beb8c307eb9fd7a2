"""The `crossfuse` command: its subcommands, and how errors reach the user."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from crossfuse.cli.anchors import anchors
from crossfuse.cli.bench import bench
from crossfuse.cli.caption import caption
from crossfuse.cli.compare import compare
from crossfuse.cli.data import data
from crossfuse.cli.demo import demo
from crossfuse.cli.evaluate import evaluate
from crossfuse.cli.explain import explain
from crossfuse.cli.export import export
from crossfuse.cli.fusion_options import FusionCommand
from crossfuse.cli.generate import generate
from crossfuse.cli.info import info
from crossfuse.cli.score import score
from crossfuse.cli.sweep import sweep
from crossfuse.cli.train import train

USAGE_ERROR = 2
INTERNAL_ERROR = 1

app = typer.Typer(
    name="crossfuse",
    help="Choose how image tokens reach the text tokens of a vision-language model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.command(cls=FusionCommand)(generate)
app.command(cls=FusionCommand)(anchors)
app.command()(explain)
app.command(cls=FusionCommand)(sweep)
app.command()(train)
app.command()(export)
app.command(cls=FusionCommand)(evaluate)
app.command()(score)
app.command()(compare)
app.command(cls=FusionCommand)(caption)
app.command()(info)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"crossfuse {version('crossfuse')}")
        raise typer.Exit


@app.callback()
def common(
    debug: Annotated[bool, typer.Option("--debug", help="Show the full trace of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 for success, 2 for a mistake in the input, 1 for a fault of crossfuse.

    A mistake is told in one line on standard error; `--debug`, before or after the subcommand, shows the
    trace.
    """
    # Before torch is loaded: threads that spin while they wait make a small model several times slower as soon as
    # another process wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug, given = _take_debug(given)
    try:
        code = app(args=given, standalone_mode=False, prog_name="crossfuse")
    except KeyboardInterrupt:
        sys.exit(130)
    except typer.Abort:
        sys.exit(INTERNAL_ERROR)
    except Exception as error:
        sys.exit(_report(error, debug=debug))
    sys.exit(code if isinstance(code, int) else 0)


def _take_debug(arguments: list[str]) -> tuple[bool, list[str]]:
    # What stands behind `--` is text of the user, such as a prompt.
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != "--debug"]
    return len(options) < end, options + arguments[end:]


def _report(error: Exception, *, debug: bool) -> int:
    """Print the error; return the exit code."""
    if debug:
        traceback.print_exception(error)
    # Usage errors of typer know their message through `format_message`; the class itself is not public.
    expected = hasattr(error, "format_message") or isinstance(
        error, (ValueError, OSError, ImportError, NotImplementedError)
    )
    message = " ".join(_message(error).split()) or "no further description"
    if not expected:
        message = f"internal error: {type(error).__name__}: {message}"
        if not debug:
            message += " (--debug shows where)"
    print(f"crossfuse: {message}", file=sys.stderr)
    return USAGE_ERROR if expected else INTERNAL_ERROR


def _message(error: Exception) -> str:
    if hasattr(error, "format_message"):
        return str(error.format_message())
    if type(error).__name__ == "ValidationError" and hasattr(error, "errors"):
        # pydantic lists every fault with a link each; the first one in its own words is what a line can hold.
        from crossfuse.data.records import first_reason

        return first_reason(error)
    return str(error)
