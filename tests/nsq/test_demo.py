"""The demo from end to end, on real servers."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import processes_in

from nsqdedupe.cli import demo_run
from nsqdedupe.cli.demo import run_demo
from nsqdedupe.cli.demo_score import Score
from nsqdedupe.cli.main import Exit, main

LIMIT = 100
"""Seconds for a run of 10, on a machine that has a lot to do."""

COMMAND = [sys.executable, "-m", "nsqdedupe", "demo"]
ROW = re.compile(r"(?P<indent> *)(?P<label>\S.*?)  +(?P<value>[\d,.]+)( [kM]B)?")


@pytest.fixture
def room(room: Path) -> Iterator[Path]:
    """In the end nothing is in it either."""
    yield room
    assert list(room.iterdir()) == []


def table(lines: list[str]) -> tuple[dict[str, int], int]:
    """The figures at the end, and the sum of what became of the copies received."""
    rows = [row for row in map(ROW.fullmatch, lines) if row and not row["label"][0].isdigit()]
    figures = {row["label"]: int(float(row["value"].replace(",", ""))) for row in rows}
    labels = [row["label"] for row in rows]
    received = next(label for label in labels if label.startswith("copies received"))
    parts = 0
    for row in rows[labels.index(received) + 1 :]:
        if not row["indent"]:
            break
        parts += int(row["value"].replace(",", ""))
    first, second = (int(count.replace(",", "")) for count in re.findall(r"([\d,]+) from nsqd", received))
    assert first + second == figures[received] == parts
    return figures, parts


def test_without_a_terminal_it_tells_its_story_in_lines_and_loses_nothing(room: Path) -> None:
    ran = subprocess.run([*COMMAND, "--messages", "3000"], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (ran.returncode, ran.stderr) == (Exit.OK, "")
    lines = ran.stdout.splitlines()
    assert lines[-1] == "lost 0"
    assert "3,000 events" in lines[0]
    assert max(map(len, lines)) < 80
    assert "\x1b" not in ran.stdout
    assert len([line for line in lines if re.match(r" *\d+\.\d s  handled ", line)]) > 2
    assert any("nsqd 2 killed with SIGKILL" in line for line in lines)
    assert any("nsqd 2 started again" in line for line in lines)

    figures, received = table(lines)
    assert figures["published, acknowledged by both nsqds"] == 3000
    assert figures["events handled"] == 3000
    assert 0 < figures["of these published again after the kill"] < 3000
    assert received > 5000
    assert figures["failures retried, and handled then"] == 3
    assert figures["slips: events handled more than once"] == 0
    assert figures["lost: events acknowledged, never handled"] == 0


def test_a_reader_that_looks_on_handles_every_copy_and_says_which_it_would_have_finished(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines"
    path.write_text("\n".join(map(str, range(200))))
    assert main(["demo", "--observe", "--input", str(path)]) == Exit.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "lost 0"
    figures, received = table(lines)
    assert figures["events handled"] == 200
    # At least one copy of each event was new; the kill may have taken copies, and answers.
    observed = figures["copies that would have been finished unprocessed"]
    assert 0 < figures["events handled more than once"] <= observed <= received - 200
    assert "duplicates finished, not handled" not in figures


def test_the_lines_of_any_file_are_events_however_odd_they_are(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []
    handle = Score.handle

    def spy(score: Score, message: Any) -> object:
        seen.append(json.loads(message.body))
        return handle(score, message)

    monkeypatch.setattr(Score, "handle", spy)
    odd = ["", "same", "same", "grüße 🎉 \u2028 \x00", 'a "quote" \\', "x" * 1_000_000, "{}", "y" * 400_000, "", "end"]
    path = tmp_path / "odd lines.log"
    path.write_text("\n".join(odd * 6))
    logging_before = logging.getLogger().handlers[:], logging.getLogger().level

    assert main(["demo", "--input", str(path)]) == Exit.OK

    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "lost 0"
    assert "odd lines.log" in "\n".join(lines[:3])
    figures, _ = table(lines)
    assert figures["events handled"] == 60
    texts = {event["id"]: event["text"] for event in seen}
    assert texts == {f"odd lines.log:{number}": text for number, text in enumerate(odd * 6, start=1)}
    assert (logging.getLogger().handlers[:], logging.getLogger().level) == logging_before


def test_a_loss_is_found_and_said_and_the_logs_are_kept(
    room: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "PATIENCE", 10.0)
    monkeypatch.setattr(demo_run, "DOWN", 0.2)
    handle = Score.handle

    def forgetful(score: Score, message: Any) -> object:
        return json.loads(message.body)["id"] == "__future__.py:7" or handle(score, message)

    monkeypatch.setattr(Score, "handle", forgetful)
    assert main(["demo", "--messages", "30"]) == Exit.FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "lost 1"
    assert lines[-3] == "Acknowledged and never handled: 1 of 30 events."
    directory = Path(lines[-2].split()[-1])
    assert directory.parent == room
    assert "HandlerFailure: staged for __future__.py:16" in (directory / "demo.log").read_text()
    subprocess.run(["rm", "-r", directory], check=True)


UNUSABLE = {
    "missing": None,
    "directory": "a directory",
    "empty": b"",
    "latin-1": b"fine\ncaf\xe9\n",
    "too-long": b"x" * (1 << 20),
}


@pytest.mark.parametrize("content", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_input_is_refused_in_one_line(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: object
) -> None:
    path = tmp_path / "input.txt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        path.mkdir()
    assert main(["demo", "--input", str(path)]) == Exit.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"nsqdedupe demo: {path}")
    assert said.err.count("\n") == 1


def test_without_nsqd_nothing_is_started(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NSQ_BIN_DIR", str(tmp_path))
    assert main(["demo", "--messages", "1"]) == Exit.USAGE
    assert f"nsqd is not in NSQ_BIN_DIR={tmp_path}" in capsys.readouterr().err


def test_a_server_that_does_not_start_is_said_and_the_logs_are_kept(
    room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nsqd", "nsqlookupd"):
        (tmp_path / name).write_text("#!/bin/sh\necho no room >&2\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("NSQ_BIN_DIR", str(tmp_path))
    assert main(["demo", "--messages", "1"]) == Exit.FAILED
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("nsqdedupe demo: nsqlookupd")
    assert "no room" in said
    directory = Path(said[-1].split()[-1])
    assert directory.parent == room
    subprocess.run(["rm", "-r", directory], check=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), BrokenPipeError()])
def test_an_interruption_keeps_no_logs(room: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def go(run: demo_run.Run) -> None:
        assert list(room.iterdir()) != []
        raise error

    monkeypatch.setattr(demo_run.Run, "go", go)
    with pytest.raises(type(error)):
        run_demo(1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_and_leaves_nothing(room: Path, number: signal.Signals) -> None:
    demo = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "/s; duplicates" in line and not line.startswith("  0.0 s"):
            break
    assert len(processes_in(room)) == 3
    demo.send_signal(number)
    out, err = demo.communicate(timeout=LIMIT)
    assert (demo.returncode, err) == (Exit.INTERRUPTED, "nsqdedupe demo: interrupted\n")
    assert "lost" not in out


def test_whoever_reads_it_may_go_away(room: Path) -> None:
    demo = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert demo.stdout is not None
    assert demo.stdout.readline().startswith(b"Publishing")
    demo.stdout.close()
    assert demo.wait(timeout=LIMIT) == Exit.FAILED
    assert demo.stderr is not None
    with demo.stderr:
        assert demo.stderr.read() == b""


def test_in_a_terminal_it_is_live_and_nothing_wraps(room: Path) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    command = [*COMMAND, "--messages", "3000"]
    demo = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**environment, "TERM": "xterm"})
    os.close(slave)
    output = read_all(master).decode()
    assert demo.wait(timeout=LIMIT) == Exit.OK
    assert output.endswith("lost 0\r\n")
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1  # the cursor, hidden and shown again
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "\n").split("\n")
    assert max(map(len, lines)) < 80
    assert len([line for line in lines if "3,000" in line and "handled" in line]) > 5
    assert any("down" in line for line in lines)


def read_all(master: int) -> bytes:
    """What a process writes to its terminal until it ends."""
    chunks = []
    while select.select([master], [], [], LIMIT)[0]:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # its end, on Linux
            break
        chunks.append(chunk)
    os.close(master)
    return b"".join(chunks)
