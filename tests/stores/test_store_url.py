"""Stores from URLs."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

import pytest
from servers import silent_ports

import nsqdedupe
from nsqdedupe.cli.local_memcached import Memcached
from nsqdedupe.errors import ConfigError
from nsqdedupe.stores.embedded import MemoryStore
from nsqdedupe.stores.memcached import MemcachedStore
from nsqdedupe.stores.url import open_store


def memory(url: str) -> MemoryStore:
    store = open_store(url)
    assert isinstance(store, MemoryStore)
    return store


def test_memory_with_all_its_options(tmp_path: Path) -> None:
    assert memory("memory://").table.slots == MemoryStore().table.slots
    assert memory("memory://?window=1000&recall=0.99").table.slots == MemoryStore(window=1000, recall=0.99).table.slots
    table = memory("memory://?slots=100&ways=8&tag_bytes=16").table
    assert (table.slots, table.ways, table.tag_bytes) == (104, 8, 16)
    path = tmp_path / "seen & done.table"
    store = memory(f"memory://?slots=64&path={str(path).replace(' ', '%20').replace('&', '%26')}")
    assert path.exists()
    store.close()


def test_memcached_with_all_its_options(memcached: Memcached) -> None:
    namespace = uuid.uuid4().hex
    options = f"window=1000&recall=0.99&namespace={namespace}&connect_timeout=0.5&timeout=2"
    store = nsqdedupe.open_store(f"memcached://{memcached.tcp_address}?{options}")
    assert isinstance(store, MemcachedStore)
    with contextlib.closing(store):
        with contextlib.closing(
            MemcachedStore(memcached.tcp_address, window=1000, recall=0.99, namespace=namespace)
        ) as same:
            assert same.slots == store.slots
        terms = store._servers.links[0]._terms
        assert (terms.connect_timeout, terms.timeout) == (0.5, 2.0)


HOSTS = {
    "memcached://127.0.0.1:{0}": ["127.0.0.1:{0}"],
    "memcached://127.0.0.1:{0}/": ["127.0.0.1:{0}"],
    "memcached://127.0.0.1:{0},127.0.0.1:{1}?window=10": ["127.0.0.1:{0}", "127.0.0.1:{1}"],
    "memcached://127.0.0.1:{0},[::1]:{1}": ["127.0.0.1:{0}", "[::1]:{1}"],
    "memcached://a.name.invalid": ["a.name.invalid:11211"],
    "memcached://[100::1],a.name.invalid:1?connect_timeout=0.01": ["[100::1]:11211", "a.name.invalid:1"],
}


@pytest.mark.parametrize(("url", "names"), HOSTS.items())
def test_hosts_ports_and_addresses_in_brackets(url: str, names: list[str], nameless: None) -> None:
    with silent_ports() as ports:
        numbers = [port.getsockname()[1] for port in ports]
        store = open_store(url.format(*numbers))
        assert isinstance(store, MemcachedStore)
        with contextlib.closing(store):
            assert [link.name for link in store._servers.links] == [name.format(*numbers) for name in names]


WRONG = {
    "": "'what is no URL': must begin with one of memory://, memcached://",
    "memory": "must begin with one of",
    "memory:?window=1": "must begin with one of",
    "redis://host": "'redis://...': must begin with one of memory://, memcached://",
    "Memory://": "'Memory://...': must begin with",
    "memory://host": "memory://host: must have no host; a file is given as memory://?path=/its/name",
    "memory:///a.table": "must have no host; a file is given as",
    "memory://?": None,
    "memory://?windows=1": "'windows' is no option of memory://: must be one of window, recall, path, slots, ways, tag",
    "memory://?namespace=a": "'namespace' is no option of memory://",
    "memory://?window=1&window=2": "'window' is given twice; give it once",
    "memory://?window=ten": "window='ten': must be a whole number",
    "memory://?window=1.5": "window='1.5': must be a whole number",
    "memory://?recall=high": "recall='high': must be a number",
    "memory://?recall=nan": "recall=nan: must be a number greater than 0",
    "memory://?window=0": "window=0: must be a whole number from 1 to",
    "memory://?window=": "'window' has no value; give one, or leave it out",
    "memory://?window": "'window' has no value",
    "memory://?window=1&&recall=0.9": "'' is no option of memory://",
    "memory://?slots=64&window=1": "slots=64: must be given alone",
    "memory://?window=1#top": "must have no fragment; write # as %23",
    "memcached://": "must name hosts and nothing else, for example memcached://10.0.0.1:11211",
    "memcached://?window=1": "must name hosts and nothing else",
    "memcached:///path": "must name hosts and nothing else",
    "memcached://h:1/path": "must name hosts and nothing else",
    "memcached://h:1,,h:2": "servers='': must be 'host:port'",
    "memcached://h:port": "servers='h:port': must be 'host:port' or",
    "memcached://h:65536": "with a port from 1 to 65535",
    "memcached://h:": "servers='h:': must be",
    "memcached://::1": "put brackets around an IPv6 address",
    "memcached://[::1": "servers='[::1': must be",
    "memcached://user:hunter2@h:1": "memcached://: must have no credentials",
    "memcached://h:1?ways=8": "'ways' is no option of memcached://: must be one of window, recall, namespace, connect",
    "memcached://h:1?timeout=soon": "timeout='soon': must be a number",
    "memcached://h:1?timeout=0": "timeout=0.0: must be a number greater than 0",
    "memcached://h:1?namespace=a%20b": "namespace='a b': must be 1 to 64 characters",
}


@pytest.mark.parametrize(("url", "text"), WRONG.items())
def test_what_is_wrong_in_a_url_is_named_with_its_remedy(url: str, text: str | None) -> None:
    if text is None:
        open_store(url).close()
        return
    with pytest.raises(ConfigError) as refused:
        open_store(url)
    assert text in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_a_url_that_is_no_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="must begin with one of"):
        open_store(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must begin with one of"):
        open_store(b"memory://")  # type: ignore[arg-type]


def test_a_password_for_another_kind_of_store_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        open_store("redis://user:hunter2@host")
    assert "hunter2" not in str(refused.value)
