"""A store in memcached, for several consumers on one channel: they share what they know.

The table of what is seen is the one of `nsqdedupe.tables.opposite_bloom`, one item per bucket of 32 tags. So its size
comes from ``window`` and ``recall``, however many messages there are, and not from what memcached evicts. Claims are
items of their own, made by ``add``, changed by compare-and-swap, and gone an hour after their lease.

Each verb is a few pipelines of meta commands, in an order that matters:

- A claim is added before the bucket is read, and a success is written into the bucket before its claim is turned into
  the marker. So between "no owner" and "done" there is no gap through which a copy gets in.
- The marker stays for some seconds where the claim was. It stops who has read the bucket before, and covers the time
  in which the bucket's half of a confirm has to be tried again.
- Who takes a message over reads its bucket again, after the swap: the last owner may have confirmed in between.
- A token for compare-and-swap says what was read, the nonce in the item says whose it is. Whoever lost the lease can
  end nothing, and whoever lost a reply finds itself.

`nsqdedupe.memcached.claiming`, ``confirming`` and ``swapping`` have the steps, and the argument for each. The verbs
here take them one after the other, and block; an event loop takes them as answers come (``memcached.on_loop``).

What memcached evicts, or loses with its process, is forgotten: then duplicates may slip. Nothing is lost by that,
because "there is no claim" never means "it is done".
"""

from __future__ import annotations

import importlib.util
import logging
import re
import ssl
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from nsqdedupe import checks
from nsqdedupe.calls import Calls, Verb
from nsqdedupe.clock import Clock, monotonic
from nsqdedupe.errors import ConfigError, MissingDependency, StoreError
from nsqdedupe.memcached.damage import Damage
from nsqdedupe.memcached.items import WAYS
from nsqdedupe.memcached.link import Link, Terms
from nsqdedupe.memcached.on_loop import Begin, OnLoop
from nsqdedupe.memcached.proof import Mark
from nsqdedupe.memcached.servers import PARTITIONS, Servers, Steps
from nsqdedupe.memcached.session import Session
from nsqdedupe.sizing import slots_for
from nsqdedupe.store import Answer, Claim, Release, Store, Traits

logger = logging.getLogger(__name__)

_NAMESPACE = re.compile(r"[a-zA-Z0-9._-]{1,64}")

T = TypeVar("T")


class MemcachedStore(Store):
    """Remembers in memcached 1.6 or newer, for all consumers that are given the same servers.

    It blocks: every verb waits for round trips, and so do the constructor and `bind`. It may be used by several
    threads, one after the other. `close` closes the connections; what is remembered stays.

    A server that is away costs what it knew: its messages are answered by `StoreUnavailable`, those of the others are
    answered all the same (see there). Nothing else takes its share over. It is asked again at growing intervals, of
    five seconds at most.

    memcached encrypts nothing unless TLS is set up, and asks nobody who they are: keep it off public networks.

    Args:
        servers: ``host:port`` or ``[ipv6]:port``, or a list of them: in any order, but written alike by all
            consumers, because a message's server is found by the names.

        window: how many further messages a message must be remembered for; 1 or more.

        recall: share of duplicates recognised that come a whole window later (nearer ones fare better); greater
            than 0, less than 1.

        namespace: what all keys begin with, 1 to 64 of ``a-z A-Z 0-9 . _ -``. All who share it share what they
            know, and must have the same window, recall, hash and secret.

        connect_timeout: seconds in which a server must take a connection, TLS included; greater than 0.

        timeout: seconds in which a server must answer a pipeline; greater than 0.

        tls_context: connects by TLS, as the context says; a round trip is then needed for every 20 messages. None:
            in the clear.

        clock: for how long a server that failed is left alone.

    Raises:
        ConfigError: an option is out of range; or a server does not behave as memcached 1.6 does; or the namespace
            was set up with another window or recall. A server that is not reached is no error: one WARNING, and it
            is looked at when it is.

        MissingDependency: pymemcache is not installed.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        window: int = 1_000_000,
        recall: float = 0.999,
        namespace: str = "nsqdedupe",
        connect_timeout: float = 0.25,
        timeout: float = 1.0,
        tls_context: ssl.SSLContext | None = None,
        clock: Clock = monotonic,
    ) -> None:
        slots = slots_for(window, recall, WAYS)
        given: object = namespace
        if not isinstance(given, str) or not _NAMESPACE.fullmatch(given):
            raise checks.refuse("namespace", namespace, "1 to 64 characters of a-z A-Z 0-9 . _ -")
        checks.number("connect_timeout", connect_timeout, 0, open_low=True, remedy="it is seconds")
        checks.number("timeout", timeout, 0, open_low=True, remedy="it is seconds")
        self._marks = [_shape(namespace, window, recall)]
        terms = Terms(namespace, connect_timeout, timeout, tls_context, clock, self._marks)
        addresses = _addresses(servers)
        if importlib.util.find_spec("pymemcache") is None:
            raise MissingDependency("MemcachedStore needs pymemcache: pip install 'nsqdedupe[memcached]'")
        self._namespace = namespace
        self._servers = Servers([Link(host, port, terms) for host, port in addresses], slots, terms)
        self._damage = Damage()
        self._tls = tls_context is not None
        self._session = self._session_on(self._servers)
        self._on_loops: weakref.WeakSet[OnLoop] = weakref.WeakSet()
        self._closed = False
        self._lock = threading.Lock()
        self._greet()

    @property
    def traits(self) -> Traits:
        """Shared, gone when memcached is, may slip, never drops a new message, does I/O."""
        return Traits(shared=True, durable=False, may_slip=True, may_false_drop=False, blocking=True)

    @property
    def slots(self) -> int:
        """How many messages fit: what ``window`` and ``recall`` need, rounded up to whole buckets."""
        return self._servers.slots

    def unreachable(self) -> list[str]:
        """See `Store.unreachable`: ``host:port`` of each."""
        return self._servers.unreachable()

    @property
    def damaged(self) -> int:
        """How many values were met that somebody else has written under keys of this store."""
        return self._damage.count

    def bind(self, hashing: str) -> None:
        """See `Store.bind`. A server that is not reached is asked when it is; if it differs, it is not used."""
        mark = Mark(
            f"{self._namespace}:hashing".encode(),
            hashing.encode(),
            f"the fingerprints in namespace {self._namespace!r} are made with {{theirs}}, not with {{ours}} as those "
            "to come, so none would be found; give the secret that was given before, or another namespace",
        )
        with self._lock:
            self._check_open()
            bound = [known for known in self._marks if known.key == mark.key]
            if bound and bound[0].value != mark.value:
                text = mark.complaint.format(theirs=bound[0].value.decode(), ours=hashing)
                raise ConfigError(f"this store: {text}")
            if bound:
                return
            self._marks.append(mark)
            try:
                self._servers.prove()
            except ConfigError:
                self._marks.remove(mark)
                raise

    def claim(self, claims: Sequence[Claim]) -> Sequence[Answer]:
        """See `Store.claim`. One round trip; a second for what meets another's claim, a third to take it over.

        A lease is 0 to 2,588,399 seconds (30 days less the hour that tries are kept); for a longer one `ConfigError`
        is raised.
        """
        return self._drive(lambda session: session.claim(claims))

    def confirm(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """See `Store.confirm`. One round trip; two more where somebody else has written a bucket meanwhile."""
        return self._drive(lambda session: session.confirm(claims))

    def release(self, releases: Sequence[Release]) -> Sequence[bool]:
        """See `Store.release`. One round trip; two more for what was not claimed on this connection."""
        return self._drive(lambda session: session.release(releases))

    def extend(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """See `Store.extend`. One round trip; two more for what was not claimed on this connection.

        A claim that memcached has evicted is made again, unless another copy was quicker.
        """
        return self._drive(lambda session: session.extend(claims))

    def start(self, claims: Sequence[Claim]) -> Sequence[bool]:
        """See `Store.start`. As long as `extend` takes. Starting twice counts once."""
        return self._drive(lambda session: session.start(claims))

    def forget(self, fingerprints: Sequence[bytes]) -> None:
        """See `Store.forget`. Two round trips. Forget while no consumer is handling these messages.

        One that is confirmed at the same moment may be done all the same.
        """
        for calls in tuple(self._on_loops):
            calls.forget(fingerprints)
        self._drive(lambda session: session.forget(fingerprints))

    def calls(self, after: Callable[[], None]) -> Calls | None:
        """See `Store.calls`. Over connections of its own, which stay until the store is closed.

        None where a verb is somebody else's, as a subclass has it: it would not be called.
        """
        session = self._session_on(self._servers.twin())
        steps: dict[Verb, Begin] = {}
        for name in ("claim", "confirm", "release", "extend", "start"):
            verb = getattr(self, name)
            if getattr(verb, "__func__", None) is not getattr(MemcachedStore, name):
                return None
            steps[verb] = getattr(session, name)
        calls = OnLoop(session, steps, self.claim, self.confirm, after)
        with self._lock:
            self._on_loops.add(calls)
            if self._closed:
                calls.close()
        return calls

    def close(self) -> None:
        """See `Store.close`. Waits for a verb that is under way in another thread; event loops are told."""
        with self._lock:
            self._closed = True
            self._servers.hang_up()
            for calls in tuple(self._on_loops):
                calls.close()

    def _greet(self) -> None:
        """Connect to all servers for the first time."""
        away = self._servers.greet()
        if away:
            logger.warning(
                "memcached not reached, its share of the messages is not de-duplicated until it is: %s", "; ".join(away)
            )

    def _session_on(self, servers: Servers) -> Session:
        return Session(servers, self._damage, tls=self._tls)

    def _drive(self, steps: Callable[[Session], Steps[T]]) -> T:
        """Take the steps of a verb, one caller at a time."""
        with self._lock:
            self._check_open()
            return self._servers.drive(steps(self._session))

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store is closed, and cannot be used any more; make another")


def _addresses(servers: object) -> list[tuple[str, int]]:
    """Host and port of each server."""
    remedy = "for example ['10.0.0.1:11211', '10.0.0.2:11211']"
    given = [checks.tcp_address("servers", server) for server in checks.strings("servers", servers)]
    if not given:
        raise checks.refuse("servers", servers, "one address or more", remedy)
    if len(set(given)) < len(given):
        raise checks.refuse("servers", servers, "different addresses", "name each server once")
    return given


def _shape(namespace: str, window: int, recall: float) -> Mark:
    """What consumers must have in common to find each other's buckets."""
    return Mark(
        f"{namespace}:shape".encode(),
        f"window={window} recall={recall!r} ways={WAYS} partitions={PARTITIONS}".encode(),
        f"namespace {namespace!r} was set up with {{theirs}}, not with {{ours}}, and consumers that differ in it would "
        "not find what the others know; give all of them the same window and recall, or this one another namespace",
    )
