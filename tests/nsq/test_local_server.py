"""What local servers of any kind have in common."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from servers import eventually, processes_in

PROGRAM = """
import pathlib, sys, time
from nsqdedupe.cli.{module} import {kind}
{kind}(directory=pathlib.Path(sys.argv[1])).start()
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("module", "kind"), [("local_nsq", "Nsqd"), ("local_nsq", "Nsqlookupd"), ("local_memcached", "Memcached")]
)
def test_a_server_dies_with_the_process_that_started_it(module: str, kind: str, tmp_path: Path) -> None:
    """Not even SIGKILL of a test run may leave a server behind."""
    program = [sys.executable, "-c", PROGRAM.format(module=module, kind=kind), tmp_path]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        assert len(processes_in(tmp_path)) == 1
        parent.kill()
    eventually(lambda: processes_in(tmp_path), until=lambda left: left == [])
