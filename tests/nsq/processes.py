"""Runs consumer_process.py, and reads what it wrote down."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from consumers import PATIENCE

import nsqdedupe
from nsqdedupe.cli.local_nsq import Nsqd, Nsqlookupd

PROGRAM = Path(__file__).with_name("consumer_process.py")


class Journal:
    """What one or more consumer processes wrote down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def facts(self, word: str) -> list[list[str]]:
        """What follows a word, in the order of writing."""
        lines = [line.split() for line in self.path.read_text().splitlines()]
        return [line[1:] for line in lines if line[0] == word]

    def bodies(self, word: str) -> list[bytes]:
        return [fact[0].encode() for fact in self.facts(word)]

    def stats(self) -> list[dict[str, Any]]:
        """The counters of each that has stopped by itself."""
        return [json.loads(text) for (text,) in self.facts("stats")]


def told_to_stop(*processes: subprocess.Popen[bytes]) -> None:
    """End them gracefully, so that they write down what they have counted."""
    for process in processes:
        process.terminate()
    for process in processes:
        assert process.wait(PATIENCE) == 0


@contextmanager
def consumer_process(
    journal: Journal, topic: str, channel: str, servers: Nsqlookupd | Iterable[Nsqd], **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A consumer on what a lookupd knows, or on given nsqds. It is killed at the end, if it still lives.

    Its log lies beside the journal.
    """
    told: dict[str, Any] = {"topic": topic, "channel": channel, "max_in_flight": 200}
    if isinstance(servers, Nsqlookupd):
        told |= {"lookupd_http_addresses": [servers.http_address], "lookupd_poll_interval": 1}
    else:
        told["nsqd_tcp_addresses"] = [nsqd.tcp_address for nsqd in servers]
    text = json.dumps({**told, **options})
    with (
        journal.path.with_suffix(".log").open("ab") as log,
        subprocess.Popen(
            [sys.executable, PROGRAM, journal.path, text],
            stdout=log,
            stderr=log,
            cwd=Path(nsqdedupe.__file__).parents[1],
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()
