"""`shardwright`: the one command, and the table of what is below it.

A command's module is loaded only when it is called, so that `shardwright --help` is quick and a problem in
one part doesn't take the others with it. Such a module has a function `register(app)` that adds its commands.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Annotated

import typer

import shardwright
from shardwright.errors import ShardwrightError


@dataclass(frozen=True)
class Command:
    """One entry of the table: where it lives, and its line in the help text."""

    module: str
    help: str


COMMANDS = {
    "run": Command("shardwright.cli.launch", "Start a training script on several processes."),
    "ckpt": Command("shardwright.cli.checkpoint", "Look at checkpoints, verify, compare, reshard, export, import and prune them."),
    "plan": Command("shardwright.cli.partition", "Show how a model is cut over pipeline stages."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; arguments without the program's name, None for those of this process.

    Raises: SystemExit, always; 2 for an error of ours or of the system, after its message.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    called = arguments[0] if arguments else ""
    try:
        with nullcontext() if called == "run" else _signals_raise():  # `run` has its own way to end
            make_app(called)(args=arguments, prog_name="shardwright")
    except ShardwrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if called == "run":
            raise
        remedy = getattr(error, "remedy", None) or "see that it can be read and written, and that there is room"
        print(f"{type(error).__name__}: {' '.join(arguments[:2])}: {error}\n  try: {remedy}", file=sys.stderr)
        raise SystemExit(2) from None


@contextmanager
def _signals_raise() -> Iterator[None]:
    """The first signal that asks for the end raises SystemExit, so that what is half written is deleted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def end(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(128 + number)

    for number in before:
        if before[number] is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, end)
    try:
        yield
    except ShardwrightError:
        if came:  # torch's writer has made another error of it
            raise SystemExit(128 + came[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def make_app(called: str) -> typer.Typer:
    """Build the command line with the module of the `called` command loaded and the others only named."""
    app = typer.Typer(
        help="Train and checkpoint models that do not fit on one device.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name, command in COMMANDS.items():
        if name == called:
            _load(name, command, app)
        else:
            app.command(name, help=command.help)(_placeholder)
    return app


def _load(name: str, command: Command, app: typer.Typer) -> None:
    try:
        module = importlib.import_module(command.module)
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"shardwright {name}: {command.module} can't be loaded, for there is no module {error.name!r}\n"
            "  try: install the package again, with the extras that this command needs"
        ) from error
    module.register(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(shardwright.__version__)
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit."),
    ] = False,
) -> None:
    """Stands for the command line itself; holds its own options."""


def _placeholder() -> None:
    """Stands for a command that is not the one called."""


if __name__ == "__main__":
    main()
