"""The local servers that every other test relies on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest
from servers import Servers, eventually, eventually_async, processes_in

from nsqdedupe.cli.local_nsq import DURABLE, Nsqd, Nsqlookupd, find_binary
from nsqdedupe.cli.local_server import LocalServerError
from nsqdedupe.errors import MissingDependency


def test_a_started_nsqd_answers_on_both_ports(nsqd: Nsqd) -> None:
    assert nsqd.stats()["version"].startswith("1.")
    with socket.create_connection(("127.0.0.1", nsqd.tcp_port), timeout=5):
        pass


def test_two_nsqds_are_found_through_nsqlookupd(nsqd_pair: tuple[Nsqd, Nsqd], lookupd: Nsqlookupd, topic: str) -> None:
    for nsqd in nsqd_pair:
        nsqd.publish(topic, b"body")
    both = sorted(nsqd.tcp_address for nsqd in nsqd_pair)
    assert lookupd.nodes() == both
    eventually(lambda: lookupd.lookup(topic), until=lambda found: found == both)


def test_a_restart_keeps_ports_and_data(nsqd: Nsqd, topic: str, channel: str) -> None:
    nsqd.create_channel(topic, channel)
    nsqd.mpublish(topic, [b"one", b"two"])
    eventually(lambda: nsqd.depth(topic, channel), until=lambda depth: depth == 2)
    before = nsqd.tcp_address, nsqd.http_address, nsqd.pid
    nsqd.restart()
    assert (nsqd.tcp_address, nsqd.http_address) == before[:2]
    assert nsqd.pid != before[2]
    eventually(lambda: nsqd.depth(topic, channel), until=lambda depth: depth == 2)


@pytest.mark.nsqd_flags(*DURABLE)
def test_a_durable_nsqd_keeps_what_is_queued_when_it_is_killed(nsqd: Nsqd, topic: str, channel: str) -> None:
    nsqd.create_channel(topic, channel)
    nsqd.publish(topic, b"one")
    eventually(lambda: nsqd.depth(topic, channel), until=lambda depth: depth == 1)
    nsqd.kill()
    assert not nsqd.alive
    with pytest.raises(OSError, match="refused"):
        nsqd.stats()
    nsqd.start()
    assert nsqd.depth(topic, channel) == 1


def test_a_killed_nsqd_registers_again_when_it_is_back(nsqd_pair: tuple[Nsqd, Nsqd], lookupd: Nsqlookupd) -> None:
    dead, alive = nsqd_pair
    dead.kill()
    eventually(lookupd.nodes, until=lambda nodes: nodes == [alive.tcp_address])
    dead.start()
    eventually(lookupd.nodes, until=lambda nodes: len(nodes) == 2)


def test_a_server_that_ignores_sigterm_is_killed_after_the_deadline(nsqd: Nsqd) -> None:
    assert nsqd.pid is not None
    os.kill(nsqd.pid, signal.SIGSTOP)
    nsqd.stop(timeout=0.2)
    assert not nsqd.alive


def test_unfinished_counts_deferred_messages_and_depth_does_not(nsqd: Nsqd, topic: str, channel: str) -> None:
    nsqd.create_channel(topic, channel)
    nsqd.publish(topic, b"later", defer_ms=60_000)
    eventually(lambda: nsqd.unfinished(topic, channel), until=lambda left: left == 1)
    assert nsqd.depth(topic, channel) == 0


def test_an_unknown_topic_or_channel_is_an_error_and_not_an_empty_one(nsqd: Nsqd, topic: str) -> None:
    with pytest.raises(LookupError, match=topic):
        nsqd.depth(topic)
    nsqd.create_topic(topic)
    with pytest.raises(LookupError, match="nowhere"):
        nsqd.depth(topic, "nowhere")


def test_a_refused_request_says_what_nsqd_said(nsqd: Nsqd) -> None:
    with pytest.raises(LocalServerError, match="INVALID_TOPIC"):
        nsqd.create_topic("not a topic")


def test_a_bad_flag_is_reported_with_the_log(servers: Servers) -> None:
    with pytest.raises(LocalServerError, match="flag provided but not defined"):
        servers.nsqd("--no-such-flag")


def test_a_server_that_does_not_start_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(LocalServerError), Nsqd("--no-such-flag"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_never_answers_is_given_up(
    monkeypatch: pytest.MonkeyPatch, servers: Servers, tmp_path: Path
) -> None:
    _program(tmp_path / "nsqd", "thinking", then="exec sleep 600")
    monkeypatch.setenv("NSQ_BIN_DIR", str(tmp_path))
    monkeypatch.setattr("nsqdedupe.cli.local_server.START_DEADLINE", 0.2)
    answers = Nsqd._answers

    def patiently(nsqd: Nsqd) -> bool:
        eventually(lambda: "thinking" in nsqd.log_tail())
        return answers(nsqd)

    # Else the time may be up before its program has begun.
    monkeypatch.setattr(Nsqd, "_answers", patiently)
    with pytest.raises(LocalServerError, match=r"(?s)did not answer within 0\.2 s.*thinking"):
        servers.nsqd()
    assert processes_in(servers.directory) == []


def test_a_port_that_is_taken_is_reported_with_the_log(servers: Servers, nsqd: Nsqd) -> None:
    with pytest.raises(LocalServerError, match="address already in use"):
        servers.nsqd(f"--tcp-address={nsqd.tcp_address}")


def test_the_ports_of_a_server_that_is_down_go_to_nobody_else(nsqd: Nsqd) -> None:
    nsqd.kill()
    for port in (nsqd.tcp_port, nsqd.http_port):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def test_a_server_of_its_own_leaves_nothing_behind() -> None:
    with Nsqd() as nsqd:
        directory = nsqd.directory
        assert len(processes_in(directory)) == 1
    assert not directory.exists()
    assert processes_in(directory) == []


def test_the_named_directory_is_the_only_place_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NSQ_BIN_DIR", str(tmp_path))
    with pytest.raises(MissingDependency, match="NSQ_BIN_DIR"):
        find_binary("nsqd")
    _program(tmp_path / "nsqd", "nsqd v9.9.9")
    assert find_binary("nsqd") == tmp_path / "nsqd"


def test_a_program_on_path_is_taken_in_the_right_version_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NSQ_BIN_DIR", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(MissingDependency, match="PATH"):
        find_binary("nsq_no_such_program")
    program = _program(tmp_path / "nsq_test_program", "nsq_test_program v1.2.1 (built w/go1.16)")
    with pytest.raises(MissingDependency, match=r"v1\.2\.1"):
        find_binary(program.name)
    _program(program, "nsq_test_program v1.3.0 (built w/go1.21)")
    assert find_binary(program.name) == program


def test_eventually_says_what_it_saw_last() -> None:
    with pytest.raises(AssertionError, match=r"not within 0\.05 s; last seen: 7"):
        eventually(lambda: 7, timeout=0.05, until=lambda seen: seen == 8)
    with pytest.raises(AssertionError, match="last seen: KeyError"):
        eventually(lambda: {"present": 1}["absent"], timeout=0.05)
    with pytest.raises(ZeroDivisionError):
        eventually(lambda: 1 // 0, timeout=5)


def test_eventually_on_an_event_loop_takes_both_kinds_of_function() -> None:
    async def main() -> None:
        arrived = asyncio.Event()
        asyncio.get_running_loop().call_later(0.02, arrived.set)

        async def look() -> bool:
            return arrived.is_set()

        await eventually_async(look)
        await eventually_async(arrived.is_set)
        with pytest.raises(AssertionError, match="last seen: False"):
            await eventually_async(lambda: False, timeout=0.05)

    asyncio.run(main())


def _program(path: Path, says: str, then: str = "") -> Path:
    path.write_text(f"#!/bin/sh\necho '{says}'\n{then}\n")
    path.chmod(0o755)
    return path
