"""How the demo shows itself: live in a terminal, else as a plain line a second."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 79
"""Columns: nothing may wrap in a terminal of 80."""

_BAR = 22


@dataclasses.dataclass(frozen=True, slots=True)
class NsqdView:
    """One nsqd at this moment; the counts are deliveries."""

    name: str
    up: bool
    received: int
    handled: int
    duplicates: int


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """The demo at this moment: seconds, events, events a second, deliveries."""

    elapsed: float
    total: int
    published: int
    to_repeat: int
    publish_rate: float
    handled: int
    handle_rate: float
    duplicates: int
    standbys: int
    failures: int
    observed: int | None
    """Deliveries that would have been finished, if the reader only looks on."""
    nsqds: Sequence[NsqdView]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A line of the final table."""

    label: str
    value: str
    detail: bool = False
    """It belongs to the line above."""

    @property
    def indented(self) -> str:
        """The label in its place."""
        return f"  {self.label}" if self.detail else self.label


class Screen(Protocol):
    """Where the demo is shown."""

    every: float
    """Seconds between two views."""

    def say(self, text: str) -> None:
        """Print a line that stays."""

    def show(self, view: View) -> None:
        """Show how it stands."""

    def table(self, rows: Sequence[Row]) -> None:
        """Show the figures at the end."""

    def close(self) -> None:
        """Leave the terminal as it was. Idempotent."""


class PlainScreen:
    """Lines of text."""

    every = 1.0

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def say(self, text: str) -> None:
        """See `Screen.say`."""
        print(text, file=self._stream, flush=True)

    def show(self, view: View) -> None:
        """See `Screen.show`."""
        down = ", ".join(f"{nsqd.name} is down" for nsqd in view.nsqds if not nsqd.up)
        self.say(
            f"{view.elapsed:5.1f} s  handled {view.handled:,} of {view.total:,}, {view.handle_rate:,.0f}/s; "
            f"{_duplicates(view)}" + (f"; {down}" if down else "")
        )

    def table(self, rows: Sequence[Row]) -> None:
        """See `Screen.table`."""
        left = max(len(row.indented) for row in rows) + 4
        right = max(len(row.value) for row in rows)
        for row in rows:
            self.say(f"{row.indented:<{left}}{row.value:>{right}}")

    def close(self) -> None:
        """See `Screen.close`."""


class LiveScreen:
    """A part of the terminal that is drawn again and again, below the lines that stay."""

    every = 0.2

    def __init__(self, console: Console) -> None:
        from rich.live import Live  # noqa: PLC0415 - optional

        self._console = console
        # Drawn when there is something to show, not by a thread of its own; wiped out before the table comes.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def say(self, text: str) -> None:
        """See `Screen.say`."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, view: View) -> None:
        """See `Screen.show`."""
        self._live.start()
        self._live.update(_live_view(view), refresh=True)

    def table(self, rows: Sequence[Row]) -> None:
        """See `Screen.table`."""
        from rich.table import Table  # noqa: PLC0415 - optional

        self.close()
        table = Table(show_header=False, width=min(WIDTH, self._console.width))
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
        for row in rows:
            table.add_row(row.indented, row.value, style="dim" if row.detail else None)
        self._console.print(table)

    def close(self) -> None:
        """See `Screen.close`."""
        self._live.stop()


def open_screen(stream: TextIO | None = None) -> Screen:
    """The screen that suits a stream: live if that is a terminal and rich is installed.

    Args:
        stream: None: standard output.
    """
    stream = stream or sys.stdout
    try:
        from rich.console import Console  # noqa: PLC0415 - optional
    except ImportError:
        return PlainScreen(stream)
    console = Console(file=stream)
    return LiveScreen(console) if console.is_terminal and not console.is_dumb_terminal else PlainScreen(stream)


def _duplicates(view: View) -> str:
    if view.observed is None:
        return f"duplicates {view.duplicates:,}"
    return f"would be duplicates {view.observed:,}"


def _live_view(view: View) -> RenderableType:
    from rich.console import Group  # noqa: PLC0415 - optional
    from rich.progress_bar import ProgressBar  # noqa: PLC0415 - optional
    from rich.table import Table  # noqa: PLC0415 - optional

    bars = Table.grid(padding=(0, 2))
    for name, count, rate in (
        ("on both nsqds", view.published, view.publish_rate),
        ("handled", view.handled, view.handle_rate),
    ):
        bar = ProgressBar(total=view.total, completed=count, width=_BAR)
        bars.add_row(name, bar, f"{count:>9,} of {view.total:,}", f"{rate:>7,.0f}/s")
    counters = f"{view.elapsed:5.1f} s   {_duplicates(view)}   standbys {view.standbys:,}   failures {view.failures:,}"
    nsqds = Table.grid(padding=(0, 3))
    for _ in range(4):
        nsqds.add_column(justify="right", min_width=10)
    nsqds.add_row("", "received", "handled", "duplicates", "", style="dim")
    for nsqd in view.nsqds:
        state = "[green]up[/]" if nsqd.up else "[bold red]down[/]"
        nsqds.add_row(nsqd.name, f"{nsqd.received:,}", f"{nsqd.handled:,}", f"{nsqd.duplicates:,}", state)
    waiting = f"{view.to_repeat:,} events are to be published again" if view.to_repeat else ""
    return Group("", bars, "", counters, "", nsqds, "", waiting)
