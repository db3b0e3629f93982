"""What a store in memcached is made with, what its servers must show, and what consumers must have in common."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from messages import NEW, Patient, ask, deliveries, delivery, message, own, verdicts
from relay import Relay, relay
from servers import Servers

from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.errors import ConfigError, MissingDependency, StoreUnavailable
from nsqdedupe.fingerprint import hashing_of
from nsqdedupe.memcached.link import LONGEST_PAUSE
from nsqdedupe.memcached.servers import Exchange
from nsqdedupe.store import Answer
from nsqdedupe.testing import ManualClock

ANYWHERE = "127.0.0.1:1"

WRONG: dict[str, tuple[dict[str, object], str]] = {
    "no server": ({"servers": []}, r"servers=\[\]: must be one address or more; for example"),
    "a server without port": ({"servers": "localhost"}, "servers='localhost': must be 'host:port'"),
    "a port that is none": ({"servers": "localhost:0"}, "with a port from 1 to 65535"),
    "bare IPv6": ({"servers": "::1:11211"}, "put brackets around an IPv6 address"),
    "no string": ({"servers": 11211}, "servers=11211: must be a string or a list of strings"),
    "the same twice": ({"servers": ["a:1", "b:1", "a:1"]}, "must be different addresses; name each server once"),
    "no window": ({"window": 0}, "window=0: must be a whole number from 1 to"),
    "recall of all": ({"recall": 1}, "recall=1: must be a number greater than 0"),
    "an empty namespace": ({"namespace": ""}, "namespace='': must be 1 to 64 characters of a-z A-Z 0-9 . _ -"),
    "a namespace with a blank": ({"namespace": "a b"}, "namespace='a b'"),
    "a namespace with a colon": ({"namespace": "a:b"}, "namespace='a:b'"),
    "a namespace with a line's end": ({"namespace": "a\n"}, r"namespace='a\\n'"),
    "a long namespace": ({"namespace": "n" * 65}, "must be 1 to 64 characters"),
    "bytes as namespace": ({"namespace": b"n"}, "namespace=b'n'"),
    "no time to connect": ({"connect_timeout": 0}, "connect_timeout=0: must be a number greater than 0; it is seconds"),
    "no time to answer": ({"timeout": None}, "timeout=None: must be a number greater than 0; it is seconds"),
}


@pytest.mark.parametrize(("options", "text"), WRONG.values(), ids=WRONG)
def test_an_option_that_is_wrong_is_named_with_its_remedy(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Patient(**{"servers": ANYWHERE, **options})  # type: ignore[arg-type]


def test_without_pymemcache_the_text_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymemcache", None)
    with pytest.raises(MissingDependency, match=r"pip install 'nsqdedupe\[memcached\]'"):
        Patient(ANYWHERE)


def test_importing_the_package_does_not_import_pymemcache() -> None:
    look = "import sys, nsqdedupe; sys.exit('pymemcache' in sys.modules)"
    subprocess.run([sys.executable, "-c", look], check=True, timeout=60)


# -- what a server must show ---------------------------------------------------------------------


@pytest.fixture
def alone() -> Iterator[Relay]:
    """What is no memcached at all: it answers by itself."""
    with relay(None) as made:
        yield made


NO_MEMCACHED = {
    "an old memcached": b"ERROR\r\n",
    "a web server": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "Redis": b"-ERR unknown command 'ms'\r\n",
    "one that wants to be told who asks": b"CLIENT_ERROR unauthenticated\r\n",
}


@pytest.mark.parametrize("reply", NO_MEMCACHED.values(), ids=NO_MEMCACHED)
def test_what_is_no_memcached_is_refused_with_the_remedy(alone: Relay, reply: bytes) -> None:
    alone.answer = lambda _: reply
    with pytest.raises(ConfigError, match=r"needed is memcached 1\.6 or newer, or a proxy that passes") as refused:
        Patient(alone.address)
    assert alone.address in str(refused.value)
    assert f"it answered {reply.splitlines()[0]!r}; " in str(refused.value)


PASSING = [b"SERVER_ERROR out of memory storing object\r\n", b"ERROR Too many open connections\r\n"]


@pytest.mark.parametrize("reply", PASSING)
def test_what_may_pass_is_a_server_that_is_away(alone: Relay, reply: bytes, caplog: pytest.LogCaptureFixture) -> None:
    alone.answer = lambda _: reply
    with contextlib.closing(Patient(alone.address)):
        assert reply.strip().decode() in caplog.text


LIES = {
    "takes nothing that is added": (b"HD c", b"NS c"),
    "takes what is added twice": (b"NS", b"HD"),
    "does not give back what it was given": (b"first", b"other"),
    "has no tokens for compare-and-swap": (b" c", b" c9"),
    "does not tell how long an item lives": (b" t", b" t9"),
    "does not keep the flags of an item": (b" f0", b" f1"),
    "swaps nothing": (b"HD c", b"NF c"),
    "swaps by a token that is used up": (b"EX", b"HD"),
    "does not give back what was swapped in": (bytes(range(14, 256)), bytes(242)),
    "says nothing of a quiet command that failed": (b"EX O0\r\n", b""),
    "deletes by a token that is used up": (b"\r\nEX\r\nHD\r\n", b"\r\nHD\r\nHD\r\n"),
    "does not delete": (b"\r\nEX\r\nHD\r\n", b"\r\nEX\r\nNF\r\n"),
    "swaps what is not there": (b"EN\r\nNF", b"EN\r\nEX"),
}
"""What a server does wrong, and how its replies give it away."""

SECOND_TRIP = set(list(LIES)[6:])


@pytest.mark.parametrize("what", LIES)
def test_a_server_that_does_not_do_as_memcached_does_is_refused(line: Relay, what: str) -> None:
    told, instead = LIES[what]
    trip = iter(range(10))

    def lie(reply: bytes) -> bytes:
        if (next(trip) == 1) is (what in SECOND_TRIP):
            changed = (
                reply.replace(told, instead)
                if what != "has no tokens for compare-and-swap"
                else reply.replace(told, instead, 1)
            )
            assert changed != reply
            return changed
        return reply

    line.lie = lie
    with pytest.raises(ConfigError, match=f"it {what}; needed is memcached 1.6"):
        Patient(line.address, namespace=uuid.uuid4().hex)


def test_one_that_misbehaves_is_refused_though_another_is_away(alone: Relay) -> None:
    alone.answer = lambda _: b"ERROR\r\n"
    with pytest.raises(ConfigError):
        Patient([ANYWHERE, alone.address])


def test_one_that_misbehaves_later_is_left_for_good_with_one_error(
    line: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    with contextlib.closing(Patient(line.address, namespace=uuid.uuid4().hex, clock=clock)) as store:
        line.cut_after = 0
        with pytest.raises(StoreUnavailable):
            store.claim(deliveries(1))
        line.lie = lambda reply: reply.replace(b"NS", b"HD")
        for _ in range(3):
            clock.advance(LONGEST_PAUSE)
            with pytest.raises(StoreUnavailable, match="it takes what is added twice"):
                store.claim(deliveries(1))
        assert line.connections == 2
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert "not used any more" in record.getMessage()


def test_a_proof_leaves_nothing_behind_but_the_marks(servers: Servers) -> None:
    server = servers.memcached()
    with contextlib.closing(Patient(server.tcp_address)) as store:
        assert int(server.stats()["curr_items"]) == 1
        store.bind("one")
        assert int(server.stats()["curr_items"]) == 2
    server.kill()


# -- what consumers must have in common ----------------------------------------------------------


def test_another_window_or_recall_is_refused_with_both_named(memcached: Memcached) -> None:
    namespace = uuid.uuid4().hex
    with contextlib.closing(Patient(memcached.tcp_address, window=1000, namespace=namespace)):
        for other in ({"window": 2000}, {"window": 1000, "recall": 0.99}):
            with pytest.raises(ConfigError, match="give all of them the same window and recall") as refused:
                Patient(memcached.tcp_address, namespace=namespace, **other)  # type: ignore[arg-type]
            assert "set up with window=1000 recall=0.999 ways=32 partitions=1024" in str(refused.value)
            assert f"not with window={other['window']} recall={other.get('recall', 0.999)} " in str(refused.value)
        Patient(memcached.tcp_address, window=1000, namespace=namespace).close()


def test_a_mark_that_somebody_has_overwritten_is_refused_too(memcached: Memcached) -> None:
    namespace = uuid.uuid4().hex
    with contextlib.closing(Patient(memcached.tcp_address, namespace=namespace)) as store:
        key = f"{namespace}:shape".encode()
        store._servers.ask(
            Exchange({store._servers.links[0]: ([b"ms %b 2\r\n\xff\xfe\r\n" % key], b"w")}, lambda *_: None)
        )
    with pytest.raises(ConfigError, match="was set up with \ufffd\ufffd, not with window="):
        Patient(memcached.tcp_address, namespace=namespace)


def test_fingerprints_of_another_secret_are_refused(memcached: Memcached) -> None:
    namespace = uuid.uuid4().hex
    with (
        contextlib.closing(Patient(memcached.tcp_address, namespace=namespace)) as store,
        contextlib.closing(Patient(memcached.tcp_address, namespace=namespace)) as other,
    ):
        store.bind(hashing_of(b"one"))
        store.bind(hashing_of(b"one"))
        for handle in (store, other):
            with pytest.raises(ConfigError) as refused:
                handle.bind(hashing_of(b"two"))
            assert f"made with {hashing_of(b'one')}, not with {hashing_of(b'two')}" in str(refused.value)
            assert "give the secret that was given before" in str(refused.value)
        # Who was refused may correct itself.
        other.bind(hashing_of(b"one"))
        claim = own(other, message())
        assert store.confirm([claim]) == [True]


def test_marks_are_looked_at_when_a_server_is_reached_at_last(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    server, clock = servers.memcached(), ManualClock()
    server.kill()
    with contextlib.closing(Patient(server.tcp_address, window=1000, clock=clock)) as late:
        late.bind("one")
        server.start()
        with contextlib.closing(Patient(server.tcp_address, window=1000)) as other:
            other.bind("another")
        clock.advance(LONGEST_PAUSE)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="made with another, not with one"):
                late.claim(deliveries(1))
            clock.advance(LONGEST_PAUSE)
        assert [record.levelname for record in caplog.records] == ["WARNING", "ERROR"]
    server.kill()


def test_a_server_that_was_emptied_gets_its_marks_again_when_it_is_connected_to(servers: Servers) -> None:
    server = servers.memcached()
    with contextlib.closing(Patient(server.tcp_address, window=1000)) as store:
        server.kill()
        server.start()
        assert ask(store, delivery(message())) == Answer(NEW)
        with pytest.raises(ConfigError, match="set up with window=1000"):
            Patient(server.tcp_address, window=2000)
    server.kill()


def test_binding_while_a_server_goes_away_is_no_error(line: Relay) -> None:
    clock = ManualClock()
    with contextlib.closing(Patient(line.address, namespace=uuid.uuid4().hex, clock=clock)) as store:
        line.cut_after = 0
        store.bind("one")
        clock.advance(LONGEST_PAUSE)
        assert ask(store, delivery(message())) == Answer(NEW)


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def encrypted(servers: Servers, authority: trustme.CA, tmp_path: Path) -> Iterator[Memcached]:
    """A memcached that speaks TLS only."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("localhost", "127.0.0.1")
    certificate.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(str(key))
    files = f"ssl_chain_cert={certificate},ssl_key={key}"
    server = TlsMemcached("-Z", "-o", files, directory=tmp_path / "memcached")
    with server:
        yield server
        server.kill()


class TlsMemcached(Memcached):
    """One that cannot be asked in the clear whether it is there."""

    def _answers(self) -> bool:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        try:
            plain = socket.create_connection(("127.0.0.1", self.tcp_port), 10)
            with plain, context.wrap_socket(plain) as line:
                line.sendall(b"version\r\n")
                return line.recv(100).startswith(b"VERSION")
        except OSError:
            return False


def test_a_store_over_tls(encrypted: Memcached, authority: trustme.CA) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with contextlib.closing(Patient(f"localhost:{encrypted.tcp_port}", tls_context=context, window=10_000)) as store:
        claims = deliveries(1000)
        assert verdicts(store.claim(claims)) == [NEW] * 1000
        assert store.confirm(claims) == [True] * 1000
        store.forget([claim.fingerprint for claim in claims])


def test_a_server_whose_certificate_is_not_trusted_is_not_used(
    encrypted: Memcached, caplog: pytest.LogCaptureFixture
) -> None:
    context = ssl.create_default_context()
    with contextlib.closing(Patient(f"localhost:{encrypted.tcp_port}", tls_context=context, window=10_000)) as store:
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
        with pytest.raises(StoreUnavailable):
            store.claim(deliveries(1))
