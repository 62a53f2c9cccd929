"""The ``raytrain`` command."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from raytrain_platform.errors import RaytrainError, SpecError, TaskError
from raytrain_platform.spec import load_spec
from raytrain_platform.task import build_task, load_task

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Elastic training on Ray. Exit codes: 0 done, 1 the job failed, 2 spec or task are wrong, 130 interrupted.",
)
_console = Console(highlight=False, stderr=True)


@app.command()
def train(
    spec_file: Annotated[Path, typer.Argument(metavar="SPEC", help="A YAML file with the fields of JobSpec.")],
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Replace a field, such as replicas.max=3.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the resolved spec and what Ray will be asked for; start nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option(help="Go on from the newest checkpoint of the same name; else move old ones aside.")
    ] = True,
) -> None:
    """Train a job, on this machine or on the cluster of RAY_ADDRESS or `ray job submit`."""
    spec = load_spec(spec_file, dict(map(_parse_assignment, assignments or [])))
    task_type = load_task(spec.task)
    build_task(task_type, spec.params)
    from raytrain_platform.training.run import describe, run_job, summarize

    if dry_run:
        sys.stdout.write(describe(spec))
        return
    typer.echo(summarize(run_job(spec, task_type, resume=resume)))


@app.command()
def demo(
    spec_file: Annotated[
        Path, typer.Argument(metavar="SPEC", help="The job to train; it must give its length in steps.")
    ] = Path("jobs/char_lm.yaml"),
) -> None:
    """Train while a node is killed and another added, and compare the weights with an undisturbed run."""
    from raytrain_platform.cli.demo import run_demo

    raise typer.Exit(run_demo(spec_file))


@app.command()
def ui(
    uri: Annotated[
        str | None, typer.Option(help="MLflow tracking URI; by default MLFLOW_TRACKING_URI, else that of ~/raytrain.")
    ] = None,
    storage: Annotated[str | None, typer.Option(help="Show the runs of jobs with this `storage` instead.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 5000,
) -> None:
    """Serve the MLflow UI with all runs, on loopback unless told otherwise."""
    from raytrain_platform.tracking.location import DATABASE_NAME, locate_uri
    from raytrain_platform.tracking.ui import serve_ui

    serve_ui(locate_uri(f"sqlite:///{storage}/{DATABASE_NAME}" if storage else uri).uri, host, port)


def _parse_assignment(text: str) -> tuple[str, Any]:
    field, equals, value = text.partition("=")
    if not equals:
        raise SpecError(f"--set {text!r}: write it as FIELD=VALUE, such as replicas.max=3")
    return field, yaml.safe_load(value)


def main() -> None:
    """Run the command; errors become one message and an exit code."""
    logging.basicConfig(level=os.environ.get("RAYTRAIN_LOG_LEVEL", "WARNING"), format="%(name)s: %(message)s")
    try:
        app()
    except (SpecError, TaskError) as error:
        _fail(error, 2)
    except RaytrainError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        _console.print("interrupted; run it again by the same name to go on")
        sys.exit(130)


def _fail(error: Exception, code: int) -> None:
    _console.print(f"error: {error}", markup=False, style="red", soft_wrap=True)
    sys.exit(code)
