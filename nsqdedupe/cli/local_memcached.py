"""A real memcached on 127.0.0.1, for the demo and the tests (Linux).

Example:
    >>> with Memcached() as memcached:
    ...     socket.create_connection((HOST, memcached.tcp_port))
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from nsqdedupe.cli.local_server import HOST, LocalServer
from nsqdedupe.errors import MissingDependency

OLDEST = (1, 6)
"""Older ones have no meta commands."""

UNPACKED = Path(__file__).parents[2] / ".tools" / "memcached" / "memcached"
"""Where a source checkout keeps the one that `make servers` got, if there was none."""


def find_memcached() -> Path:
    """Where memcached 1.6 or newer is.

    In this order: the program that the environment variable MEMCACHED names (no other, if it is set);
    ``.tools/memcached`` beside a source checkout; PATH.

    Raises:
        MissingDependency: there is none, or only an older one; the text says what was tried.
    """
    remedy = "in a source checkout `make servers` gets it; else install memcached 1.6 or newer"
    named = os.environ.get("MEMCACHED")
    if named:
        if os.access(named, os.X_OK):
            return Path(named).absolute()
        raise MissingDependency(f"MEMCACHED={named} is no program; correct or unset it; {remedy}")
    if os.access(UNPACKED, os.X_OK):
        return UNPACKED
    found = shutil.which("memcached")
    if found is None:
        raise MissingDependency(f"memcached is needed; tried MEMCACHED (not set), {UNPACKED} and PATH; {remedy}")
    try:
        version = subprocess.run([found, "-V"], capture_output=True, text=True, timeout=5, check=False).stdout.strip()  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        version = str(error)
    parsed = re.match(r"memcached (\d+)\.(\d+)", version)
    if not parsed or (int(parsed[1]), int(parsed[2])) < OLDEST:
        raise MissingDependency(f"memcached 1.6 or newer is needed, but {found} says {version!r}; {remedy}")
    return Path(found)


class Memcached(LocalServer):
    """A memcached of one's own; what it knows is gone when it restarts.

    Args:
        flags: further command line flags, for example ``"-M"``. They win over ours.

        memory: megabytes it may take for items (its ``-m``).

        directory: where its log lies; made if need be, and kept. None: a temporary one.
    """

    program = "memcached"

    def __init__(self, *flags: str, memory: int = 64, directory: Path | None = None) -> None:
        super().__init__(find_memcached(), *flags, directory=directory)
        self._memory = memory

    def command(self, line: str) -> list[str]:
        """Send one line of its protocol, for example ``"stats"`` or ``"flush_all"``.

        Returns:
            The lines of the answer, without the ``END`` of a longer one.

        Raises:
            OSError: it cannot be reached, or does not answer within 10 s.
        """
        with socket.create_connection((HOST, self.tcp_port), timeout=10) as connection:
            connection.sendall(f"{line}\r\n".encode())
            answer = connection.makefile("rb")
            lines = [_line(answer.readline())]
            while lines[-1].startswith(("STAT ", "ITEM ")):
                lines.append(_line(answer.readline()))
        return lines[:-1] if lines[-1] == "END" else lines

    def stats(self, what: str = "") -> dict[str, str]:
        """What ``stats`` says, as a whole or of one thing (``"settings"``, ``"items"``)."""
        entries = [line.split(" ", 2) for line in self.command(f"stats {what}".rstrip())]
        return {entry[1]: entry[2] for entry in entries if entry[0] == "STAT"}

    def _own_flags(self) -> list[str]:
        # Without -u it refuses to run as root. To become anybody else would undo its promise to die with us.
        user = ["-u", "root"] if os.geteuid() == 0 else []
        return ["-l", HOST, "-p", str(self.tcp_port), "-U", "0", "-m", str(self._memory), "-v", *user]

    def _answers(self) -> bool:
        try:
            return self.command("version")[0].startswith("VERSION ")
        except OSError:
            return False


def _line(raw: bytes) -> str:
    if not raw.endswith(b"\r\n"):
        raise ConnectionError("memcached hung up in the middle of an answer")
    return raw[:-2].decode()
