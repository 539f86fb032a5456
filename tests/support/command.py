"""The command in this process, and what it says as it refuses its input."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from mhsa_compile.cli.app import app


def mhsa(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(*arguments: object) -> str:
    """What a command prints, which ends well."""
    result = mhsa(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def printed_json(*arguments: object) -> Any:
    """The same of a command that prints JSON."""
    return json.loads(printed(*arguments, "--json"))


def refused(result: Result) -> str:
    """The one message of a command that refused its input."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr
