"""The memcached that other tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from servers import Servers

from nsqdedupe.cli.local_memcached import Memcached, find_memcached
from nsqdedupe.cli.local_server import LocalServerError
from nsqdedupe.errors import MissingDependency

TOOL = Path(__file__).parents[2] / "tools" / "get-memcached"


def test_it_speaks_the_meta_commands(memcached: Memcached) -> None:
    assert memcached.command("mn") == ["MN"]


def test_it_listens_on_this_machine_only_and_not_by_udp(memcached: Memcached) -> None:
    settings = memcached.stats("settings")
    assert settings["inter"] == "127.0.0.1"
    assert settings["udpport"] == "0"


def test_its_memory_can_be_chosen(servers: Servers) -> None:
    assert servers.memcached(memory=3).stats()["limit_maxbytes"] == str(3 << 20)


def test_a_restart_keeps_the_port_and_forgets_the_rest(servers: Servers) -> None:
    memcached = servers.memcached()
    assert memcached.command("ms key 0\r\n") == ["HD"]
    assert memcached.command("mg key") == ["HD"]
    port = memcached.tcp_port
    memcached.kill()
    with pytest.raises(OSError, match="refused"):
        memcached.command("version")
    assert memcached.start().tcp_port == port
    assert memcached.command("mg key") == ["EN"]


def test_a_port_that_is_taken_is_reported_with_the_log(servers: Servers, memcached: Memcached) -> None:
    with pytest.raises(LocalServerError, match=r"(?s)memcached on .*Address already in use"):
        servers.memcached("-p", str(memcached.tcp_port))


def test_a_memcached_that_is_cut_off_is_not_there_yet(servers: Servers) -> None:
    with pytest.raises(ConnectionError):
        servers.memcached().command("quit")


def test_the_named_program_is_the_only_one_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "mine"
    monkeypatch.setenv("MEMCACHED", str(program))
    with pytest.raises(MissingDependency, match=r"MEMCACHED=.*make servers"):
        find_memcached()
    _program(program, "memcached 1.4.0")
    assert find_memcached() == program


@pytest.mark.parametrize("says", ["memcached 1.5.22", "memcached-like 2.0", ""])
def test_an_older_one_on_path_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str) -> None:
    program = _on_path_alone(monkeypatch, tmp_path)
    _program(program, says)
    with pytest.raises(MissingDependency, match=f"1.6 or newer is needed, but .*{says}"):
        find_memcached()
    _program(program, "memcached 1.6.0_beta1")
    assert find_memcached() == program


def test_one_that_cannot_be_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = _on_path_alone(monkeypatch, tmp_path)
    program.write_bytes(b"\x7fELF")
    program.chmod(0o755)
    with pytest.raises(MissingDependency, match="Exec format error"):
        find_memcached()


def test_none_at_all_is_said_with_what_was_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _on_path_alone(monkeypatch, tmp_path)
    with pytest.raises(MissingDependency, match=r"tried MEMCACHED \(not set\).* and PATH"):
        find_memcached()


def test_one_that_was_unpacked_is_taken_before_that_on_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _program(_on_path_alone(monkeypatch, tmp_path), "memcached 1.6.18")
    unpacked = tmp_path / "unpacked"
    _program(unpacked, "memcached 1.6.18")
    monkeypatch.setattr("nsqdedupe.cli.local_memcached.UNPACKED", unpacked)
    assert find_memcached() == unpacked


def get_memcached(*options: str, named: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "MEMCACHED": str(named)}
    return subprocess.run(
        [sys.executable, TOOL, *options], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_the_tool_prints_the_path_of_the_named_program_and_only_that(tmp_path: Path) -> None:
    _program(tmp_path / "mine", "memcached 1.6.18")
    told = get_memcached("--print-path", named=tmp_path / "mine")
    assert (told.returncode, told.stdout, told.stderr) == (0, f"{tmp_path / 'mine'}\n", "")


def test_the_tool_looks_no_further_than_the_named_program(tmp_path: Path) -> None:
    _program(tmp_path / "old", "memcached 1.5.22")
    for name, why in ("old", "says 'memcached 1.5.22'"), ("absent", "cannot be run: No such file"):
        told = get_memcached("--print-path", named=tmp_path / name)
        assert (told.returncode, told.stdout) == (1, "")
        assert f"MEMCACHED={tmp_path / name}: " in told.stderr
        assert why in told.stderr


def _on_path_alone(monkeypatch: pytest.MonkeyPatch, directory: Path) -> Path:
    """Where a program is the only memcached to be found."""
    monkeypatch.delenv("MEMCACHED", raising=False)
    monkeypatch.setenv("PATH", str(directory))
    monkeypatch.setattr("nsqdedupe.cli.local_memcached.UNPACKED", directory / "nothing-unpacked")
    return directory / "memcached"


def _program(path: Path, says: str) -> None:
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
