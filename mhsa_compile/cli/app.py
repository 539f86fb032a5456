"""The command `mhsa`. Each command imports the modules it needs when it runs, so that `mhsa --help` answers at once."""

from __future__ import annotations

import gc
import signal
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from mhsa_compile.cli.commands import (
    bench,
    cache,
    compile,
    devices,
    doctor,
    heads,
    inspect,
    profile,
    records,
    run,
    tune,
)
from mhsa_compile.cli.common import output
from mhsa_compile.cli.common.bad_values import refusal_of_value
from mhsa_compile.cli.common.option_groups import flatten_options
from mhsa_compile.errors import MhsaError
from mhsa_compile.files.foreign_errors import refusal_of

_ENDING = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
_COMMANDS: dict[str, Callable[..., None]] = {
    "compile": compile.compile_source,
    "run": run.run,
    "verify": run.verify,
    "profile": profile.profile,
    "heads": heads.heads,
    "bench": bench.bench,
    "bundle": devices.bundle,
    "serve": devices.serve,
    "measure": devices.measure,
    "tune": tune.tune,
    "inspect": inspect.inspect,
    "targets": inspect.targets,
    "doctor": doctor.doctor,
}


class _Commands(TyperGroup):
    """The one place where bad input becomes one message on stderr and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MhsaError as error:
            _refuse(error)
        except Exception as error:
            if (refusal := refusal_of_value(error) or refusal_of(error)) is None:
                raise
            _refuse(refusal)


def _refuse(error: MhsaError) -> None:
    typer.secho("Error: ", fg="red", err=True, nl=False)
    output.line(str(error), err=True)
    raise typer.Exit(2) from error


def _version(wanted: bool) -> None:
    if wanted:
        from mhsa_compile.version import __version__

        output.line(f"mhsa {__version__}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """Compile multi-head attention for a target, then run, verify and time what was compiled."""


app = typer.Typer(cls=_Commands, no_args_is_help=True, callback=_root, pretty_exceptions_show_locals=False)
for _name, _command in _COMMANDS.items():
    app.command(_name)(flatten_options(_command))
_records = typer.Typer(no_args_is_help=True, help=records.__doc__)
for _name, _command in records.COMMANDS.items():
    _records.command(_name)(flatten_options(_command))
app.add_typer(_records, name="records")
_cache = typer.Typer(invoke_without_command=True, callback=cache.show, help=cache.__doc__)
_cache.command("clear")(cache.clear)
app.add_typer(_cache, name="cache")


def main() -> None:
    """The console script. Where a signal ends it, what is unfinished is removed first, and the exit code is the shell's
    for that signal."""
    gc.set_threshold(20_000, 20, 20)  # importing PyTorch and TVM, and exporting, make many objects and hardly a cycle
    signals: list[int] = []

    def end(number: int, _: object) -> NoReturn:
        for other in _ENDING:
            signal.signal(other, signal.SIG_IGN)  # a second one would interrupt the removing
        signals.append(number)
        raise SystemExit(128 + number)

    for number in _ENDING:
        if signal.getsignal(number) == signal.SIG_DFL:  # nohup, for instance, has one ignored
            signal.signal(number, end)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = output.warning
            app(prog_name="mhsa")
    except Exception:
        if signals:  # within a function that TVM calls, it became a RuntimeError
            raise SystemExit(128 + signals[0]) from None
        raise
