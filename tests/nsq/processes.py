"""Runs consumer_process.py, and reads what it wrote down."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nsqdedupe
from nsqdedupe.cli.local_nsq import Nsqlookupd

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


@contextmanager
def consumer_process(
    journal: Journal, topic: str, channel: str, lookupd: Nsqlookupd, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A consumer that is killed at the end, if it still lives; its log lies beside the journal."""
    told = {"lookupd_http_addresses": [lookupd.http_address], "lookupd_poll_interval": 1, "max_in_flight": 200}
    text = json.dumps({"topic": topic, "channel": channel, **told, **options})
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
