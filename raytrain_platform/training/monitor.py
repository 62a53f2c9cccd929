"""What a person sees of a running job: a live view in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from raytrain_platform.spec import JobSpec
from raytrain_platform.tracking.records import PHASES, RecoveryRecord, StepRecord
from raytrain_platform.training.job import Observer

_LINE_EVERY_S = 2.0


@contextlib.contextmanager
def make_monitor(spec: JobSpec, observers: Sequence[Observer] | None) -> Iterator[Sequence[Observer]]:
    """The given observers, or else a view that suits the terminal."""
    if observers is not None:
        yield observers
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        yield [LineMonitor(spec, console)]
        return
    view = LiveMonitor(spec)
    with Live(view, console=console, refresh_per_second=8):
        yield [view]


class LineMonitor:
    """Prints a line for each event, and every two seconds one for the steps."""

    def __init__(self, spec: JobSpec, console: Console) -> None:
        """Print to ``console``."""
        self._spec, self._console = spec, console
        self._next_s = 0.0

    def on_steps(self, records: list[StepRecord]) -> None:
        """See ``Observer``."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_EVERY_S
            self._print(f"step {records[-1].step}: {_in_words(records[-1])}")

    def on_recovery(self, record: RecoveryRecord) -> None:
        """See ``Observer``."""
        if record.num_replicas_before == 0:
            return
        phases = ", ".join(f"{name.removesuffix('_s')} {seconds:.3f}" for name, seconds in record.phases.items())
        what = f"generation {record.generation} ({record.cause}) paused {record.pause_s:.3f} s"
        self._print(f"{what}: {phases}")

    def on_event(self, text: str) -> None:
        """See ``Observer``."""
        self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(f"[{self._spec.name}] {text}", soft_wrap=True)


class LiveMonitor:
    """A progress bar, the newest numbers, and a timeline of events."""

    def __init__(self, spec: JobSpec, num_steps: int | None = None) -> None:
        """Show a job.

        Args:
            spec: The job.
            num_steps: Steps it will take, if known; else those of the spec.
        """
        self._spec = spec
        self._begin_s = time.monotonic()
        self._events: deque[tuple[float, str]] = deque(maxlen=12)
        self._newest: StepRecord | None = None
        self._evaluated: dict[str, float] = {}
        self._progress = Progress(
            TextColumn("{task.description}", style="bold"),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            expand=True,
        )
        self._bar = self._progress.add_task(spec.name, total=num_steps or spec.steps)

    def on_steps(self, records: list[StepRecord]) -> None:
        """See ``Observer``."""
        for record in records:
            if "train/loss" in record.metrics:
                self._newest = record
            else:
                self._evaluated |= record.metrics
        self._progress.update(self._bar, completed=records[-1].step)

    def on_recovery(self, record: RecoveryRecord) -> None:
        """See ``Observer``."""
        if record.num_replicas_before:
            self.on_event(f"{record.cause}: {record.detail}; paused {record.pause_s * 1000:.0f} ms")

    def on_event(self, text: str) -> None:
        """See ``Observer``."""
        self._events.append((time.monotonic() - self._begin_s, text))

    def __rich__(self) -> RenderableType:
        """Draw."""
        numbers = Text(_in_words(self._newest) if self._newest else "starting: Ray places the replicas, they prepare")
        for name, value in self._evaluated.items():
            numbers.append(f"   {name} {value:.4g}", style="green")
        events = Table.grid(padding=(0, 2))
        for seconds, text in self._events:
            events.add_row(Text(f"{seconds:7.1f} s", style="dim"), text)
        return Panel(Group(self._progress, numbers, "", events), title="raytrain", border_style="dim")


def recovery_table(records: Sequence[RecoveryRecord]) -> Table:
    """The recoveries of a job, phase by phase, in milliseconds."""
    table = Table(title="Changes of generation (ms)")
    names = [phase.removesuffix("_s").replace("_", " ") for phase in PHASES]
    for name in ("gen", "cause", "step", "replicas", *names):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("pause", justify="right", style="bold")
    for record in records:
        sizes = f"{record.num_replicas_before} to {record.num_replicas}"
        phases = [f"{record.phases[name] * 1000:.0f}" for name in PHASES]
        table.add_row(
            str(record.generation), record.cause, str(record.at_step), sizes, *phases, f"{record.pause_s * 1000:.0f}"
        )
    return table


def _in_words(record: StepRecord) -> str:
    metrics = record.metrics
    shown = {
        "loss": f"{metrics['train/loss']:.4f}" if "train/loss" in metrics else None,
        "samples/s": f"{metrics['perf/samples_per_s']:.0f}" if "perf/samples_per_s" in metrics else None,
        "workers": f"{metrics['elastic/world_size']:.0f}" if "elastic/world_size" in metrics else None,
        "generation": f"{metrics['elastic/generation']:.0f}" if "elastic/generation" in metrics else None,
    }
    others = {name: f"{value:.4g}" for name, value in metrics.items() if name.startswith("val/")}
    return "   ".join(f"{name} {value}" for name, value in (shown | others).items() if value is not None)
