"""What a stage shows on a terminal and off it, and what it leaves in `metrics.jsonl` and for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tensorboardX.proto.event_pb2 import Event

from surprisal_jax.training import progress
from surprisal_jax.training.progress import StageLog


def lines(directory: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    text = (directory / "metrics.jsonl").read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def events(directory: Path) -> Iterator[Event]:
    """Event files are TFRecords: length, its checksum, the event, its checksum."""
    for path in sorted(directory.glob("events*"), key=lambda p: p.name):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack_from("<Q", content)
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


class Probe:
    """A metric that knows whether it was read."""

    def __init__(self, value: float) -> None:
        self.value, self.read = value, False

    def __float__(self) -> float:
        self.read = True
        return self.value


def test_a_step_is_read_when_the_next_is_logged(tmp_path: Path) -> None:
    first, second, third = Probe(1.0), Probe(2.0), Probe(3.0)
    with StageLog("reference", 9, 0, tmp_path, 1) as log:
        log.log(1, {"loss": first})
        assert not first.read
        log.log(2, {"loss": second})
        assert first.read and not second.read
        assert lines(tmp_path) == [{"stage": "reference", "step": 1, "loss": 1.0}]
        log.flush()
        assert second.read
        assert lines(tmp_path)[-1] == {"stage": "reference", "step": 2, "loss": 2.0}
        log.log(3, {"loss": third})
        assert not third.read
    assert [line["loss"] for line in lines(tmp_path)] == [1.0, 2.0, 3.0]


def test_device_arrays_become_the_numbers_they_hold(tmp_path: Path) -> None:
    metrics = {"loss": jnp.float32(0.1), "posterior_usage/0": jnp.bfloat16(0.5), "n": 3}
    with StageLog("disentangle", 2, 0, tmp_path, 1) as log, jax.transfer_guard("disallow"):
        log.log(1, metrics)
        log.log(2, {})
    # 0.1 in float32, exactly
    expected = {
        "stage": "disentangle",
        "step": 1,
        "loss": 13421773 / 2**27,
        "posterior_usage/0": 0.5,
        "n": 3.0,
    }
    assert lines(tmp_path) == [expected]
    assert list(lines(tmp_path)[0]) == list(expected)


def test_values_that_json_cannot_hold_are_strings(tmp_path: Path) -> None:
    with StageLog("reference", 1, 0, tmp_path, 1) as log:
        log.log(1, {"a": math.nan, "b": jnp.float32(math.inf), "c": -math.inf, "loss": 1e-45})
    (line,) = lines(tmp_path)
    assert line == {
        "stage": "reference",
        "step": 1,
        "a": "NaN",
        "b": "Infinity",
        "c": "-Infinity",
        "loss": 1e-45,
    }
    assert math.isnan(float(line["a"])) and float(line["c"]) == -math.inf


OTHER = '{"stage": "reference", "step": 900,   "loss": 1.5}'


def test_resuming_drops_the_later_lines_of_the_stage(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    mine = [json.dumps({"stage": "disentangle", "step": step, "loss": 1.0}) for step in (10, 20, 30, 40)]
    path.write_text("\n".join([mine[0], OTHER, *mine[1:], '{"stage": "disentangle", "st']), encoding="utf-8")
    with StageLog("disentangle", 100, 20, tmp_path, 10) as log:
        assert path.read_text(encoding="utf-8") == "\n".join([mine[0], OTHER, mine[1], ""])
        log.log(30, {"loss": 2.0})
    assert [(line["stage"], line["step"], line["loss"]) for line in lines(tmp_path)] == [
        ("disentangle", 10, 1.0),
        ("reference", 900, 1.5),
        ("disentangle", 20, 1.0),
        ("disentangle", 30, 2.0),
    ]
    assert not list(tmp_path.glob("*.tmp"))
    with StageLog("disentangle", 100, 0, tmp_path, 10):
        pass
    assert path.read_text(encoding="utf-8") == OTHER + "\n"


def test_metrics_survive_a_failure_while_lines_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(OTHER + '\n{"stage": "score", "step": 3}\n', encoding="utf-8")
    before = path.read_bytes()

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt), StageLog("score", 5, 0, tmp_path, 1):
        pass
    assert path.read_bytes() == before


def test_tensorboard_has_every_metric_and_forgets_what_a_resume_repeats(tmp_path: Path) -> None:
    for start in (0, 2):
        with StageLog("disentangle", 9, start, tmp_path, 1) as log:
            for step in range(start + 1, start + 4):
                log.log(step, {"loss": 10.0 * start + step, "floor_rate/inverse_nll": 0.25})
    found = list(events(tmp_path / "tensorboard" / "disentangle"))
    scalars = [(e.step, v.tag, v.simple_value) for e in found for v in e.summary.value]
    assert scalars[:4] == [
        (1, "loss", 1.0),
        (1, "floor_rate/inverse_nll", 0.25),
        (2, "loss", 2.0),
        (2, "floor_rate/inverse_nll", 0.25),
    ]
    assert [value for _, tag, value in scalars if tag == "loss"] == [1.0, 2.0, 3.0, 23.0, 24.0, 25.0]
    # A START record of step 3 makes TensorBoard discard what an earlier file holds from step 3 on.
    assert [e.step for e in found if e.session_log.status == e.session_log.START] == [1, 3]


def test_flush_brings_events_to_disk(tmp_path: Path) -> None:
    with StageLog("disentangle", 9, 0, tmp_path, 1) as log:
        log.log(1, {f"metric{i}": float(i) for i in range(30)})
        log.flush()
        found = [v.tag for e in events(tmp_path / "tensorboard" / "disentangle") for v in e.summary.value]
    assert found == [f"metric{i}" for i in range(30)]


def test_plain_line_every_tenth_off_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with StageLog("disentangle", 200, 0, tmp_path, 10) as log:
        clock[0] += 60.0  # compilation
        for step in range(1, 201):
            log.log(step, {"total": step / 8, "prior_kl": 9.0} if step % 10 == 0 else {})
            clock[0] += 0.5
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "disentangle 20/200 (10%), loss 2.5, 2 steps/s, 1:30 left"
    assert output[4] == "disentangle 100/200 (50%), loss 12.5, 2 steps/s, 0:50 left"
    assert output[9] == "disentangle 200/200 (100%), loss 25, 2 steps/s, 0:00 left"
    assert len(output) == 10


def test_plain_lines_of_a_resumed_stage_and_of_one_without_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]
) -> None:
    with StageLog("score", 10, 7, tmp_path, 1) as log:
        for step in (8, 9, 10):
            log.log(step, {})
            clock[0] += 4000.0
    assert capsys.readouterr().out.splitlines() == [
        "score 8/10 (80%)",
        "score 9/10 (90%), 0.00025 steps/s, 1:06:40 left",
        "score 10/10 (100%), 0.00025 steps/s, 0:00 left",
    ]
    assert not list(tmp_path.iterdir())


def test_rate_follows_a_change_of_pace(tmp_path: Path, capsys: pytest.CaptureFixture[str], clock: list[float]) -> None:
    with StageLog("disentangle", 1000, 0, tmp_path, 10) as log:
        for step in range(1, 1001):
            log.log(step, {})
            clock[0] += 10.0 if step < 500 else 0.1
    assert capsys.readouterr().out.splitlines()[-1] == "disentangle 1000/1000 (100%), 10 steps/s, 0:00 left"


def test_bar_on_a_terminal_shows_loss_rate_and_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    controller, terminal = pty.openpty()
    received: list[bytes] = []

    def read() -> None:
        # Linux ends a terminal whose other side is closed with an error.
        while True:
            try:
                chunk = os.read(controller, 65536)
            except OSError:
                return
            if not chunk:
                return
            received.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(terminal, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with StageLog("disentangle", 600, 0, tmp_path, 10) as log:
            for step in range(1, 302):
                log.log(step, {"loss": 1.2345} if step % 10 == 0 else {})
                clock[0] += 0.5
    reader.join()
    os.close(controller)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(received).decode())
    shown = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    assert re.fullmatch(r"disentangle ━+[╸╺]?━+ +301/600 loss 1\.234, 2 steps/s \d:\d\d:\d\d 2:30 left", shown[-1])
    assert max(map(len, shown)) <= 80


def test_what_is_kept_is_written_when_the_stage_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), StageLog("reference", 9, 0, tmp_path, 1) as log:
        log.log(1, {"loss": math.nan})
        raise ZeroDivisionError
    assert lines(tmp_path) == [{"stage": "reference", "step": 1, "loss": "NaN"}]


def test_unreadable_metrics_do_not_hide_what_ended_the_stage(tmp_path: Path) -> None:
    deleted = jnp.ones(())
    deleted.delete()
    with pytest.raises(ZeroDivisionError), StageLog("reference", 9, 0, tmp_path, 1) as log:
        log.log(1, {"loss": deleted})
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="deleted"), StageLog("reference", 9, 0, tmp_path, 1) as log:
        log.log(1, {"loss": deleted})


def test_other_processes_stay_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"stage": "reference", "step": 5}\n', encoding="utf-8")
    with StageLog("reference", 2, 0, tmp_path, 1) as log:
        log.log(1, {"loss": 1.0})
        log.log(2, {"loss": 1.0})
    assert path.read_text(encoding="utf-8") == '{"stage": "reference", "step": 5}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert capsys.readouterr().out == ""


def test_stage_without_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StageLog("score", 0, 0, tmp_path, 1):
        pass
    assert capsys.readouterr().out == ""
