"""A program as a process of one's own, and a server on 127.0.0.1: what nsqd, nsqlookupd, memcached share (Linux).

It has a directory and a log, keeps port and data over a restart, and dies with the process that started it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from nsqdedupe.errors import DedupeError

HOST = "127.0.0.1"
START_DEADLINE = 15.0
"""Seconds a server has to answer; it needs about 0.02, so this is for a machine under load."""

# The kernel kills a server when the thread that forked it ends: hence one thread that lives as long as
# this process. The signal is asked for by a program that then becomes the server, not by a preexec_fn,
# which is unsafe once a process has threads. A parent that died before the request is seen in getppid.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="server-spawner")
_BECOME = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class LocalServerError(DedupeError):
    """A local server did not start, died, or refused a request; the text has the last lines of its log."""


def _reserve_port() -> socket.socket:
    """Hold a free port for as long as the socket is open.

    Bound but never listening, it keeps the port from being given to anybody else, also while the server
    is down, yet lets the server itself listen (Go, too, sets SO_REUSEADDR).
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((HOST, 0))
    return holder


class LocalProcess(ABC):
    """A program that is started, watched and ended.

    Args:
        binary: the program.

        flags: further command line flags, for example ``"--msg-timeout=1s"``. They win over ours.

        directory: where its log (and its data) lie; made if need be, and kept. None: a temporary one,
            removed by `close`.
    """

    program: str
    """What it is called: in errors, and as its log."""

    def __init__(self, binary: Path, *flags: str, directory: Path | None = None) -> None:
        self._binary = binary
        self._flags = flags
        self._temporary = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix=f"{self.program}-")) if directory is None else directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log_path = self.directory / f"{self.program}.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Its process, or None while it is down."""
        return self._process.pid if self.alive and self._process else None

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """How it ended (minus the signal's number, if one ended it); None while it runs or was not started."""
        return None if self._process is None else self._process.poll()

    def start(self) -> Self:
        """Start it and wait until it answers; does nothing while it runs.

        Raises:
            LocalServerError: it ended (a bad flag, a port taken) or did not answer in time.
        """
        if self.alive:
            return self
        command = [str(self._binary), *self._own_flags(), *self._flags]
        launch = [sys.executable, "-I", "-S", "-c", _BECOME, str(os.getpid()), *command]
        with self.log_path.open("ab") as log:
            self._process = _spawner.submit(
                subprocess.Popen, launch, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory
            ).result()
        deadline = time.monotonic() + START_DEADLINE
        while not self._answers():
            if not self.alive:
                raise self.failed(f"ended with {self._process.returncode} instead of starting")
            if time.monotonic() > deadline:
                self.kill()
                raise self.failed(f"did not answer within {START_DEADLINE:g} s")
            time.sleep(0.005)
        return self

    def stop(self, timeout: float = 10.0) -> None:
        """End it with SIGTERM (nsqd then writes its queues to disk), after ``timeout`` seconds with SIGKILL."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """End it at once with SIGKILL: what nsqd held in memory alone is gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def restart(self) -> Self:
        """Stop it, if it runs, and start it again on the same ports with the same data."""
        self.stop()
        return self.start()

    def close(self) -> None:
        """Stop it for good, and remove its directory if it is a temporary one."""
        self.stop()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of its log, those of earlier starts included."""
        try:
            log = self.log_path.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ""
        # A refused flag is followed by 150 lines that explain all others: they would hide it.
        return "\n".join([line for line in log if not line.startswith(("  -", "    \t"))][-lines:])

    def __str__(self) -> str:
        return self.program

    def failed(self, what: str) -> LocalServerError:
        """An error that says what it did, and shows the last lines of its log."""
        return LocalServerError(f"{self} {what}\nlast lines of its log:\n{self.log_tail()}")

    @abstractmethod
    def _own_flags(self) -> list[str]:
        """The flags that it always gets, before those of its caller."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it is ready."""


class LocalServer(LocalProcess):
    """A process that listens on a TCP port of its own.

    Args:
        binary: as for `LocalProcess`, and so are the others.
    """

    def __init__(self, binary: Path, *flags: str, directory: Path | None = None) -> None:
        super().__init__(binary, *flags, directory=directory)
        self._holders: list[socket.socket] = []
        self.tcp_port = self._own_port()

    @property
    def tcp_address(self) -> str:
        """``host:port`` for clients; the same over restarts."""
        return f"{HOST}:{self.tcp_port}"

    def close(self) -> None:
        """As for `LocalProcess`; and free its ports."""
        super().close()
        for holder in self._holders:
            holder.close()

    def __str__(self) -> str:
        return f"{self.program} on {self.tcp_address}"

    def _own_port(self) -> int:
        """A port that is kept for it until it is closed."""
        self._holders.append(_reserve_port())
        return int(self._holders[-1].getsockname()[1])
