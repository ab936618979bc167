"""`kvsnap …` in this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner, Result

from kvsnap_jobs.cli import main


def invoke(*args: object) -> Result:
    """Whatever its exit status; what would be a traceback is raised."""
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def run(*args: object, status: int = 0) -> Result:
    """With this exit status."""
    result = invoke(*args)
    assert result.exit_code == status, result.output
    return result


def run_json(*args: object, status: int = 0) -> Any:
    """With --json: what it printed."""
    return json.loads(run(*args, "--json", status=status).stdout)
