"""`nsqdedupe demo`: two copies of every message, handlers that fail, an nsqd that is killed. What is lost?"""

from __future__ import annotations

import contextlib
import shutil
import sys
import textwrap
from pathlib import Path

import nsqdedupe
from nsqdedupe.cli.demo_events import file_events, library_events, printable
from nsqdedupe.cli.demo_run import Run, nsqd_views
from nsqdedupe.cli.demo_score import SLIPS_BY_KILL, Result, broken_promises
from nsqdedupe.cli.demo_screen import WIDTH, Row, open_screen
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd, find_binary
from nsqdedupe.cli.workplace import workplace
from nsqdedupe.sizing import FINGERPRINT_BYTES

_NO_SLIPS = f"The kill explains {SLIPS_BY_KILL} slips: the consumer lived, and knows what it has handled."
_OBSERVED = "The reader looked on: no copy was finished, held or sent back for another's sake."

MESSAGES = 100_000
"""How many events there are by default."""


def run_demo(messages: int | None = None, source: Path | None = None, *, observe: bool = False) -> bool:
    """Run the demo on standard output, until it is done.

    Args:
        messages: how many events at most; None: 100,000 of the standard library's lines, or all of a file's.

        source: the file whose lines are published; None: the standard library's source files.

        observe: the reader only looks on.

    Returns:
        Whether all promises were kept.

    Raises:
        InputError: the input cannot be published; nothing was started.

        MissingDependency: there is no nsqd; nothing was started.

        LocalServerError: a server did not start.
    """
    events = file_events(source, messages) if source else library_events(messages or MESSAGES)
    for server in (Nsqd, Nsqlookupd):
        find_binary(server.program)
    with workplace() as directory, contextlib.closing(open_screen()) as screen:
        run = Run(events, screen, directory, observe=observe)
        for line in _introduction(len(events), source, observe=observe):
            screen.say(line)
        stats = run.go()
        result = run.score.result()
        broken = broken_promises(result, observe=observe)
        screen.table(_rows(run, stats, result, observe=observe))
        explained = _OBSERVED if observe else _NO_SLIPS
        for line in [*broken, f"What the servers and the reader logged: {directory}"] if broken else [explained]:
            screen.say(line)
        screen.say(f"lost {result.lost:,}")
        if not broken:
            shutil.rmtree(directory)
    return not broken


def _introduction(count: int, source: Path | None, *, observe: bool) -> list[str]:
    lines = f"the lines of {printable(source.name)}" if source else "the lines of Python's standard library"
    rule = "the reader looks on, and lets all be handled" if observe else "each event must be handled once"
    story = (
        f"Publishing {count:,} event{'s' * (count != 1)}, {lines}, to two real nsqds each. "
        f"Two copies of every event arrive; {rule}. "
        "Some are slow, some fail at first, and halfway nsqd 2 is killed. Is any lost?"
    )
    return textwrap.wrap(story, WIDTH)


def _rows(run: Run, stats: nsqdedupe.Stats, result: Result, *, observe: bool) -> list[Row]:
    """The table at the end."""
    repeated = "events handled more than once" if observe else "slips: events handled more than once"
    observed = Row("copies that would have been finished unprocessed", f"{stats.observed:,}")
    parts = {  # of the copies received: they add up
        "handled, and answered": stats.handled,
        "duplicates finished, not handled": stats.duplicates,
        "failed at first, sent back": stats.failed,
        "sent back unhandled: not their turn yet": stats.deferred,
        "given up, or invalid": stats.given_up + stats.invalid,
        "not answered: their nsqd was killed": stats.unanswered,
        "not answered: still open": stats.in_flight,
    }
    nsqds = ", ".join(f"{view.received:,} from {view.name}" for view in nsqd_views(run.nsqds, stats))
    return [
        Row("published, acknowledged by both nsqds", f"{result.published:,}"),
        Row("of these published again after the kill", f"{run.publisher.again:,}", detail=True),
        Row(f"copies received ({nsqds})", f"{stats.received:,}"),
        *(Row(label, f"{count:,}", detail=True) for label, count in parts.items() if count),
        *([observed] if observe else []),
        Row("copies that stood by while another was handled", f"{stats.standbys:,}"),
        Row("failures retried, and handled then", f"{result.retried:,}"),
        Row(repeated, f"{result.slips:,}"),
        Row("lost: events acknowledged, never handled", f"{result.lost:,}"),
        Row("events handled", f"{result.handled:,}"),
        Row(f"events a second, over {run.seconds:.1f} s", f"{result.handled / run.seconds:,.0f}"),
        Row("memory of the table of what is done", _memory(run.store.table.nbytes)),
        Row("a Python set of the same fingerprints", _memory(_set_bytes(result.total))),
    ]


def _memory(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.1f} kB"  # noqa: PLR2004 - the unit


def _set_bytes(count: int) -> int:
    """What a set of so many fingerprints takes, measured: the set, and the bytes objects in it."""
    fingerprints = {number.to_bytes(FINGERPRINT_BYTES, "little") for number in range(count)}
    return sys.getsizeof(fingerprints) + sum(map(sys.getsizeof, fingerprints))
