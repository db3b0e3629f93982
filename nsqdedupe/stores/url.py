"""A store from a URL, for whoever configures by text: the environment, a command line, a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import unquote

from nsqdedupe.errors import ConfigError
from nsqdedupe.store import Store
from nsqdedupe.stores.embedded import MemoryStore
from nsqdedupe.stores.memcached import MemcachedStore

MEMCACHED_PORT = 11211


def open_store(url: str) -> Store:
    """Make the store that a URL describes.

    - ``memory://?window=1000000&recall=0.999&path=/var/lib/seen.table`` is a `MemoryStore`; also ``slots``, ``ways``
      and ``tag_bytes``.
    - ``memcached://10.0.0.1:11211,10.0.0.2:11211?window=1000000&recall=0.999`` is a `MemcachedStore`; also
      ``namespace``, ``connect_timeout`` and ``timeout``. The port may be left out; IPv6 addresses stand in brackets.

    What is left out has the default of the class. ``%`` stands before two hex digits for any byte, as in all URLs.
    It blocks as the class does.

    Raises:
        ConfigError: it is no such URL, or an option is refused.

        MissingDependency: a library for this kind of store is not installed.
    """
    given: object = url
    scheme, colon, rest = given.partition("://") if isinstance(given, str) else ("", "", "")
    kind = _KINDS.get(scheme)
    if kind is None or not colon:
        # The rest may hold a password meant for another kind of store.
        what = f"{scheme}://..." if colon else "what is no URL"
        known = ", ".join(f"{name}://" for name in _KINDS)
        raise ConfigError(f"store URL: {what!r}: must begin with one of {known}")
    make, options = kind
    if "#" in rest:
        raise ConfigError(f"store URL: {scheme}://: must have no fragment; write # as %23")
    where, _, query = rest.partition("?")
    if "@" in where:
        raise ConfigError(f"store URL: {scheme}://: must have no credentials; none of these stores takes any")
    return make(where, _parse(scheme, query, options))


def _parse(scheme: str, query: str, options: Mapping[str, Callable[[str], object]]) -> dict[str, object]:
    """The options in the part after the question mark, each as its own type."""
    found: dict[str, object] = {}
    for part in query.split("&") if query else []:
        name, equals, text = part.partition("=")
        read = options.get(name)
        if read is None:
            raise ConfigError(f"store URL: {name!r} is no option of {scheme}://: must be one of {', '.join(options)}")
        if name in found:
            raise ConfigError(f"store URL: {name!r} is given twice; give it once")
        value = unquote(text)
        if not equals or not value:
            raise ConfigError(f"store URL: {name!r} has no value; give one, or leave it out")
        try:
            found[name] = read(value)
        except ValueError:
            what = "a whole number" if read is int else "a number"
            raise ConfigError(f"store URL: {name}={value!r}: must be {what}") from None
    return found


def _memory(where: str, options: Mapping[str, object]) -> Store:
    if where:
        raise ConfigError(
            f"store URL: memory://{where}: must have no host; a file is given as memory://?path=/its/name"
        )
    return MemoryStore(**options)  # type: ignore[arg-type]


def _memcached(where: str, options: Mapping[str, object]) -> Store:
    hosts = where.removesuffix("/")
    if not hosts or "/" in hosts:
        raise ConfigError(
            f"store URL: memcached://{where}: must name hosts and nothing else, for example "
            "memcached://10.0.0.1:11211,10.0.0.2:11211"
        )
    return MemcachedStore([_with_port(host) for host in hosts.split(",")], **options)  # type: ignore[arg-type]


def _with_port(host: str) -> str:
    """The address with the default port if it has none."""
    named = host.rpartition("]")[2] if host.startswith("[") else host
    return host if ":" in named or not host else f"{host}:{MEMCACHED_PORT}"


_KINDS: Mapping[str, tuple[Callable[[str, Mapping[str, object]], Store], Mapping[str, Callable[[str], object]]]] = {
    "memory": (
        _memory,
        {"window": int, "recall": float, "path": str, "slots": int, "ways": int, "tag_bytes": int},
    ),
    "memcached": (
        _memcached,
        {"window": int, "recall": float, "namespace": str, "connect_timeout": float, "timeout": float},
    ),
}
