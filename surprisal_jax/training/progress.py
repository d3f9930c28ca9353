"""What a training stage shows and leaves behind: a progress bar, `metrics.jsonl` and TensorBoard events."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from surprisal_jax.files import write_text

logger = logging.getLogger(__name__)

# Shown as "loss" where a stage logs one of them, the first that is there.
_LOSS_NAMES = ("loss", "total", "reference_loss")
# Measurements of the rate that are kept: enough for it to include evaluations and checkpoints.
_RATE_WINDOW = 32
_FLUSH_SECONDS = 10.0


class StageLog:
    """Progress and metrics of one stage, one entry behind the step that was last dispatched.

    Metrics may be arrays that a device is still computing: `log` keeps them and reads those of the call
    before, so the host never waits for the newest step. `flush` and leaving the context read what is kept.

    Args:
        stage: its name in the bar and in every line.
        total_steps: of the whole stage.
        start_step: steps done before, on resume. Lines of this stage beyond it are dropped from
            `metrics.jsonl`, and TensorBoard is told to forget its later events.
        directory: gets `metrics.jsonl`, one JSON object a line (`stage`, `step`, then the metrics by name),
            and `tensorboard/<stage>/`. Neither is made before there is something to write.
        log_every: steps from one measurement of the rate to the next.

    On a terminal there is a bar with loss, steps a second, time elapsed and time left; elsewhere a plain line
    every tenth of the stage. Of several processes, the first shows and writes.

    JSON has no number for what is not finite: such a metric is written as the string "NaN", "Infinity" or
    "-Infinity", which keeps the line readable to every parser, tells which it was, and is what `float`
    accepts.
    """

    def __init__(self, stage: str, total_steps: int, start_step: int, directory: Path, log_every: int) -> None:
        self._stage, self._total, self._start, self._log_every = stage, total_steps, start_step, log_every
        self._path = Path(directory) / "metrics.jsonl"
        self._active = jax.process_index() == 0 and total_steps > 0
        self._pending: tuple[int, Mapping[str, Any]] | None = None
        self._loss: float | None = None
        self._marks: deque[tuple[int, float]] = deque(maxlen=_RATE_WINDOW)
        self._file: IO[bytes] | None = None
        self._events: _Events | None = None
        self._display: _Bar | _Lines | None = None

    def __enter__(self) -> StageLog:
        if self._active:
            _drop_later_lines(self._path, self._stage, self._start)
            console = Console()
            bar = sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal
            self._display = (_Bar if bar else _Lines)(console, self._stage, self._total, self._start)
        return self

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """After `step` steps of the stage have been dispatched. Empty metrics move the bar and write nothing.

        Args:
            metrics: name to scalar: numbers, or arrays of shape () on any device.
        """
        if self._active:
            self._settle()
            self._pending = (step, metrics)

    def flush(self) -> None:
        """Reads and writes what is kept, waiting for its step. Call it before a checkpoint of it is saved.

        Otherwise a run killed between the checkpoint and the next `log` resumes after a step whose line is
        missing.
        """
        self._settle()
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Writes what is kept and ends the display. Leaving the context does the same."""
        try:
            self._settle()
        finally:
            if self._display is not None:
                self._display.close()
            if self._file is not None:
                self._file.close()
            if self._events is not None:
                self._events.close()
            self._display = self._file = self._events = None
            self._active = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What ended the stage must not be hidden by metrics that it has made unreadable.
        with contextlib.suppress(Exception) if error is not None else contextlib.nullcontext():
            self.close()

    def _settle(self) -> None:
        if self._pending is None:
            return
        (step, metrics), self._pending = self._pending, None
        # One transfer for all of them, after which a dict is sorted; they are logged in the caller's order.
        on_host = jax.device_get(dict(metrics))
        values = {name: float(on_host[name]) for name in metrics}
        now = time.monotonic()
        if values:
            self._write(step, values)
            self._loss = next((values[name] for name in _LOSS_NAMES if name in values), self._loss)
        if not self._marks or step >= self._marks[-1][0] + self._log_every:
            self._marks.append((step, now))
        if self._display is not None:
            self._display.show(step, self._loss, self._rate())

    def _rate(self) -> float | None:
        """Steps a second over the last marks; the first of all follows the first step and its compilation."""
        if len(self._marks) < 2:
            return None
        (first, began), (last, ended) = self._marks[0], self._marks[-1]
        return (last - first) / max(ended - began, 1e-9)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115 (open for the whole stage)
        record = {"stage": self._stage, "step": step} | {name: _as_json(v) for name, v in values.items()}
        # Unbuffered: one write of a whole line, so that neither a reader nor a kill meets half of one.
        self._file.write((json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode())
        if self._events is None:
            self._events = _Events(self._path.parent / "tensorboard" / self._stage, self._start)
        self._events.write(step, values)


class _Events:
    """A TensorBoard event file. All metrics of a step are one event.

    tensorboardX's own `SummaryWriter` hands one event a metric to a thread through a queue of ten, which
    makes `log` wait, and its `flush` does not wait for that queue.
    """

    def __init__(self, directory: Path, start_step: int) -> None:
        # Brings protobuf, which a stage without metrics and the losses need not pay for.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        directory.mkdir(parents=True, exist_ok=True)
        # The file's name ends in the second; the step keeps a quick second start from overwriting the first.
        self._writer = EventsWriter(str(directory / "events"), filename_suffix=f".{start_step}")
        # TensorBoard discards what earlier files hold from this step on.
        self._writer.write_event(
            Event(step=start_step + 1, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
        )
        self._flushed = time.monotonic()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.write_event(Event(step=step, wall_time=time.time(), summary=Summary(value=scalars)))
        if time.monotonic() > self._flushed + _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._writer.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()


class _Bar:
    def __init__(self, console: Console, stage: str, total: int, start: int) -> None:
        self._total = total
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task(stage, total=total, completed=start, state="", left="")
        self._progress.start()

    def show(self, step: int, loss: float | None, rate: float | None) -> None:
        self._progress.update(
            self._task,
            completed=step,
            state=_describe(loss, rate),
            left=_time_left(self._total - step, rate),
        )

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, console: Console, stage: str, total: int, start: int) -> None:
        self._console, self._stage, self._total = console, stage, total
        self._tenth = 10 * start // total

    def show(self, step: int, loss: float | None, rate: float | None) -> None:
        tenth = 10 * step // self._total
        if tenth > self._tenth:
            self._tenth = tenth
            parts = [
                f"{self._stage} {step}/{self._total} ({100 * step // self._total}%)",
                _describe(loss, rate),
                _time_left(self._total - step, rate),
            ]
            self._console.print(", ".join(filter(None, parts)), highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        pass


def _describe(loss: float | None, rate: float | None) -> str:
    parts = [] if loss is None else [f"loss {loss:.4g}"]
    if rate is not None:
        parts.append(f"{rate:.3g} steps/s" if rate < 1000 else f"{rate:.0f} steps/s")
    return ", ".join(parts)


def _time_left(steps: int, rate: float | None) -> str:
    if not rate:
        return ""
    minutes, seconds = divmod(round(steps / rate), 60)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}") + " left"


def _as_json(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _drop_later_lines(path: Path, stage: str, start_step: int) -> None:
    """Leaves the lines of other stages and those of `stage` up to `start_step`."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    kept = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            logger.warning("%s, line %d: dropped, it is not whole: %.40s", path, number, line)
            continue
        if record.get("stage") != stage or record.get("step", 0) <= start_step:
            kept.append(line)
    write_text(path, "".join(line + "\n" for line in kept))
