"""The directory in which a demo has its servers' data, and all that is logged."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def workplace() -> Iterator[Path]:
    """A directory for data and logs, where all logging goes meanwhile.

    It is removed when somebody interrupts, and stays when something goes wrong; else the caller removes it.
    """
    directory = Path(tempfile.mkdtemp(prefix="nsqdedupe-demo-"))
    root = logging.getLogger()
    before = root.handlers[:], root.level
    handler = logging.FileHandler(directory / "demo.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    try:
        yield directory
    except BaseException as error:
        # Whoever closes the other end of a pipe interrupts too.
        if isinstance(error, Exception) and not isinstance(error, BrokenPipeError):
            error.add_note(f"What the servers and the reader logged: {directory}")
            raise
        shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        root.handlers[:], root.level = before
        handler.close()
