"""What the demo is made of, without servers: its events, its account, its producer, its screens, its options."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from nsqdedupe.cli import demo_publish, demo_score, main
from nsqdedupe.cli.demo_events import LONGEST, Event, InputError, file_events, library_events
from nsqdedupe.cli.demo_publish import Publisher, batches
from nsqdedupe.cli.demo_score import HandlerFailure, Result, Score, broken_promises
from nsqdedupe.cli.demo_screen import LiveScreen, NsqdView, PlainScreen, Row, View, open_screen
from nsqdedupe.cli.local_server import LocalServerError
from nsqdedupe.cli.main import Exit
from nsqdedupe.errors import DedupeError, MissingDependency, PublishError
from nsqdedupe.version import __version__


def some_events(count: int) -> list[Event]:
    return [Event(f"f:{n}", json.dumps({"id": f"f:{n}", "text": "t"}).encode()) for n in range(1, count + 1)]


# -- events --------------------------------------------------------------------------------------


def test_the_library_gives_the_same_events_each_time() -> None:
    events = library_events(5000)
    assert events == library_events(5000)
    assert len({event.id for event in events}) == 5000


def test_an_event_says_where_its_line_is_and_what_it_says() -> None:
    event = library_events(1)[0]
    name, line = event.id.rsplit(":", 1)
    assert (name, line) == ("__future__.py", "1")
    text = json.loads(event.body)["text"]
    assert Path(os.__file__).with_name(name).read_text().split("\n")[0] == text


def test_a_library_is_read_in_the_order_of_its_paths_without_tests_and_other_encodings(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/test/t.py", "site-packages/s.py", "notes.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\nend")
    (tmp_path / "a" / "latin.py").write_bytes(b"fine\n\xe9\n")
    ids = [event.id for event in library_events(100, tmp_path)]
    assert ids == ["b.py:1", "b.py:2", "a/z.py:1", "a/z.py:2"]


def test_a_library_without_sources_is_said_to_have_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no Python source files: name a file of your own with --input"):
        library_events(10, tmp_path)


def test_lines_of_a_file_keep_their_text_whatever_it_is(tmp_path: Path) -> None:
    lines = ["", "same", "same", 'quotes " \\ and \t', "grüße 🎉 \u2028 \x0c \x00", "x" * 500_000, "last"]
    path = tmp_path / "odd.log"
    path.write_bytes("\r\n".join(lines).encode())
    events = file_events(path)
    assert [json.loads(event.body) for event in events] == [
        {"id": f"odd.log:{number}", "text": text} for number, text in enumerate(lines, start=1)
    ]


def test_a_limit_ends_the_events_early(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one\ntwo\n\xff\n")
    assert [event.id for event in file_events(path, 2)] == ["f:1", "f:2"]


def test_a_file_name_of_any_bytes_makes_ids(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9\n.txt")
    path.write_text("line")
    assert json.loads(file_events(path)[0].body)["id"] == "caf\\xe9\n.txt:1"


def test_the_longest_line_that_nsqd_takes_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("x" * (LONGEST - 30))
    assert len(file_events(path)[0].body) < LONGEST


UNUSABLE = {
    "empty": (b"", "is empty, so there is nothing to publish"),
    "latin-1": (b"fine\ncaf\xe9\n", "line 2 is not UTF-8 at byte 4"),
    "too-long": (b"x" * LONGEST, "line 1 is too long"),
    "too-long-in-the-end": (b"fine\n" + b"x" * (LONGEST - 8), "line 2 is too long"),
    "longer-as-json": (b"\0" * 200_000, "line 1 is too long"),
    "cut-within-a-character": ("xé".encode() * LONGEST, "line 1 is too long"),
}


@pytest.mark.parametrize(("content", "complaint"), UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_file_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "input"
    path.write_bytes(content)
    with pytest.raises(InputError, match=re.escape(f"{path}: {complaint}")):
        file_events(path)


def test_a_complaint_stays_on_one_line_whatever_the_file_is_called(tmp_path: Path) -> None:
    with pytest.raises(InputError) as raised:
        file_events(tmp_path / "two\nlines")
    assert "\n" not in str(raised.value)


# -- the account ---------------------------------------------------------------------------------


def run_all(score: Score, events: Sequence[Event]) -> list[str]:
    """Handle each once; returns the ids of those that failed."""
    failed = []

    async def handle() -> None:
        for event in events:
            try:
                outcome = score.handle(SimpleNamespace(body=event.body))
                assert outcome is True or await outcome is True
            except HandlerFailure:
                failed.append(event.id)

    asyncio.run(handle())
    return failed


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_score, "SLOW", 0)


@pytest.mark.usefixtures("quick")
def test_one_in_a_thousand_fails_once() -> None:
    events = some_events(3000)
    score = Score(events)
    assert run_all(score, events) == ["f:501", "f:1501", "f:2501"]
    assert score.result().retried == 0
    assert run_all(score, [event for event in events if event.id in score.failed]) == []
    assert score.result() == Result(total=3000, published=0, handled=3000, retried=3, slips=0, lost=0)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("count", [1, 2, 400])
def test_one_fails_even_of_a_few(count: int) -> None:
    events = some_events(count)
    assert len(run_all(Score(events), events)) == 1


@pytest.mark.usefixtures("quick")
def test_what_was_acknowledged_and_not_handled_is_lost_and_what_was_handled_twice_slipped() -> None:
    events = some_events(100)
    score = Score(events)
    score.acknowledge(events[:90])
    run_all(score, events[:80])
    run_all(score, events[10:13])
    assert score.result() == Result(total=100, published=90, handled=79, retried=0, slips=3, lost=11)


@pytest.mark.parametrize(
    ("counts", "lines"),
    [
        ({}, []),
        ({"retried": 7}, []),
        ({"lost": 1, "handled": 1999}, ["Acknowledged and never handled: 1 of 2,000 events."]),
        ({"slips": 1}, ["Handled more than once: 1 events. The kill explains 0."]),
        ({"published": 1500}, ["Not acknowledged by both nsqds in time: 500 events."]),
        ({"lost": 1, "slips": 1, "published": 1}, ["Acknowledged and", "Handled more", "Not acknowledged"]),
    ],
)
def test_a_promise_is_broken_by_loss_slips_and_what_was_never_published(
    counts: dict[str, int], lines: list[str]
) -> None:
    kept = {"total": 2000, "published": 2000, "handled": 2000, "retried": 2, "slips": 0, "lost": 0}
    broken = broken_promises(Result(**{**kept, **counts}))
    assert len(broken) == len(lines)
    assert all(text.startswith(start) for text, start in zip(broken, lines, strict=True))


# -- the producer --------------------------------------------------------------------------------


class FlakyWriter:
    """Refuses what it is told to refuse; the rest it keeps."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.bodies: list[bytes] = []

    async def publish_many(self, topic: str, bodies: Sequence[bytes]) -> None:
        await asyncio.sleep(0)
        if self.refusals:
            self.refusals -= 1
            raise PublishError("down", acknowledged=(), failed={})
        self.bodies += bodies


@pytest.mark.parametrize("refusals", [0, 1, 4])
def test_what_fails_is_published_again_until_it_is_acknowledged(monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
    monkeypatch.setattr(demo_publish, "DURATION", 0.2)
    monkeypatch.setattr(demo_publish, "RETRY_PAUSE", 0.02)
    events = some_events(500)
    score = Score(events)
    writer = FlakyWriter(refusals)
    publisher = Publisher(writer, "t", events, score)
    asyncio.run(publisher.run())
    assert sorted(writer.bodies) == sorted(event.body for event in events)
    assert len(score.acknowledged) == 500
    assert (publisher.waiting, publisher.open) == (0, 0)
    assert (publisher.again > 0) == (refusals > 0)


@pytest.mark.parametrize(("count", "rate", "largest"), [(0, 10, 0), (1, 500, 1), (99, 500, 10), (999, 5000, 100)])
def test_batches_hold_every_event_once_in_order(count: int, rate: float, largest: int) -> None:
    events = some_events(count)
    cut = list(batches(events, rate))
    assert [event for batch in cut for event in batch] == events
    assert max(map(len, cut), default=0) == largest


def test_batches_of_long_events_stay_below_what_nsqd_takes() -> None:
    events = [Event(str(n), b"x" * 100_000) for n in range(50)] + [Event("long", b"x" * LONGEST)] * 3
    cut = list(batches(events, 1e6))
    assert [event for batch in cut for event in batch] == events
    assert max(sum(len(event.body) for event in batch) for batch in cut) == LONGEST


# -- the screens ---------------------------------------------------------------------------------

VIEW = View(
    elapsed=123.4,
    total=1_000_000,
    published=999_000,
    to_repeat=0,
    publish_rate=12_345.6,
    handled=998_000,
    handle_rate=12_345.6,
    duplicates=1_234_567,
    observed=None,
    standbys=45_678,
    failures=1_000,
    nsqds=[NsqdView("nsqd 1", True, 1_234_567, 999_000, 234_567), NsqdView("nsqd 2", True, 999_000, 1, 998_999)],
)
ROWS = [Row("published", "1,000,000"), Row("of these again", "9", detail=True)]


def live_screen() -> tuple[LiveScreen, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, height=24, color_system=None, _environ={})
    return LiveScreen(console), stream


def texts(output: str) -> list[str]:
    """The lines without what moves the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "\n").split("\n")


def test_the_live_screen_fits_a_small_terminal() -> None:
    screen, stream = live_screen()
    screen.say("what happened")
    screen.show(VIEW)
    lines = texts(stream.getvalue())
    assert max(map(len, lines)) < 80
    assert len(lines) < 20
    shown = "\n".join(lines)
    for text in ("what happened", "999,000 of 1,000,000", "12,346/s", "duplicates 1,234,567", "up"):
        assert text in shown
    assert "down" not in shown
    screen.close()


def test_the_live_screen_shows_who_is_down_and_what_waits_for_it() -> None:
    screen, stream = live_screen()
    nsqd = NsqdView("nsqd 2", False, 0, 0, 0)
    screen.show(View(**{**{name: getattr(VIEW, name) for name in View.__slots__}, "to_repeat": 5, "nsqds": [nsqd]}))
    shown = "\n".join(texts(stream.getvalue()))
    assert "down" in shown
    assert "5 events are to be published again" in shown
    screen.close()


def test_the_live_part_is_gone_when_the_table_comes() -> None:
    screen, stream = live_screen()
    screen.show(VIEW)
    screen.table(ROWS)
    screen.say("lost 0")
    screen.close()
    output = stream.getvalue()
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1
    after = texts(output.split("\x1b[?25h")[-1])
    assert [line for line in after if "of these again" in line] != []
    assert after[-2:] == ["lost 0", ""]


def test_the_plain_screen_is_made_of_lines() -> None:
    stream = io.StringIO()
    screen = PlainScreen(stream)
    screen.show(VIEW)
    screen.table(ROWS)
    screen.close()
    assert stream.getvalue().split("\n") == [
        "123.4 s  handled 998,000 of 1,000,000, 12,346/s; duplicates 1,234,567",
        "published           1,000,000",
        "  of these again            9",
        "",
    ]


def test_a_reader_that_looks_on_says_what_it_would_finish() -> None:
    stream = io.StringIO()
    PlainScreen(stream).show(dataclasses.replace(VIEW, observed=77))
    assert stream.getvalue().endswith("; would be duplicates 77\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_screen_is_live_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_screen(Terminal()), LiveScreen)
    assert isinstance(open_screen(io.StringIO()), PlainScreen)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_screen(Terminal()), PlainScreen)


def test_without_rich_the_screen_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(open_screen(Terminal()), PlainScreen)


# -- options and statuses ------------------------------------------------------------------------


def refuse_to_run(*args: object) -> bool:
    raise AssertionError("the demo ran")


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        ([], "required: command"),
        (["dmeo"], "'dmeo'"),
        (["demo", "--messages", "0"], "'0' is no whole number of 1 or more"),
        (["demo", "--messages", "many"], "'many' is no whole number of 1 or more"),
        (["demo", "--mess", "1"], "--mess"),
        (["demo", "--loop"], "--loop"),
        (["demo", "extra"], "extra"),
        (["demo", "--input"], "--input: expected one argument"),
    ],
)
def test_what_is_not_known_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], complaint: str
) -> None:
    monkeypatch.setattr(main, "run_demo", refuse_to_run)
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == Exit.USAGE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("nsqdedupe")
    assert said.err.count("\n") == 1
    assert complaint in said.err


@pytest.mark.parametrize("argv", [["--help"], ["demo", "--help"]])
def test_the_help_names_the_exit_statuses(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == Exit.OK
    said = capsys.readouterr().out
    assert all(re.search(rf"^  {status.value} ", said, re.MULTILINE) for status in Exit)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"nsqdedupe v{__version__}\n"


def test_python_runs_the_package(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["nsqdedupe", "--version"])
    with pytest.raises(SystemExit):
        runpy.run_module("nsqdedupe", run_name="__main__")
    assert __version__ in capsys.readouterr().out


def test_options_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(main, "run_demo", lambda *options, observe: given.append((*options, observe)) or True)
    assert main.main(["demo"]) == Exit.OK
    assert main.main(["demo", "--messages", "7", "--input", "a b", "--observe"]) == Exit.OK
    assert given == [(None, None, False), (7, Path("a b"), True)]


def noted(error: Exception, note: str) -> Exception:
    error.add_note(note)
    return error


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (InputError("f: is empty"), Exit.USAGE, "nsqdedupe demo: f: is empty\n"),
        (MissingDependency("nsqd is needed"), Exit.USAGE, "nsqdedupe demo: nsqd is needed\n"),
        (noted(LocalServerError("nsqd died"), "logs: x"), Exit.FAILED, "nsqdedupe demo: nsqd died\nlogs: x\n"),
        (DedupeError("odd"), Exit.FAILED, "nsqdedupe demo: odd\n"),
        (KeyboardInterrupt(), Exit.INTERRUPTED, "nsqdedupe demo: interrupted\n"),
        (asyncio.CancelledError(), Exit.INTERRUPTED, "nsqdedupe demo: interrupted\n"),
    ],
)
def test_each_end_has_its_status(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: Exit,
    said: str,
) -> None:
    def run(*_: object, **__: object) -> bool:
        raise error

    monkeypatch.setattr(main, "run_demo", run)
    assert main.main(["demo"]) == status
    assert capsys.readouterr().err == said


def test_a_broken_promise_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "run_demo", lambda *_, **__: False)
    assert main.main(["demo"]) == Exit.FAILED


def test_a_reader_that_went_away_is_not_complained_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(*_: object, **__: object) -> bool:
        raise BrokenPipeError

    monkeypatch.setattr(main, "run_demo", run)
    with (tmp_path / "stdout").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main.main(["demo"]) == Exit.FAILED
        stdout.write("what was buffered")
    assert (tmp_path / "stdout").read_text() == ""
