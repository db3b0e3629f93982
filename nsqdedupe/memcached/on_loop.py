"""Steps taken by an event loop as answers come: nothing blocks, and no thread is handed anything.

To hand a call to a thread and its results back takes longer than memcached does, and while the loop's thread is busy,
the other one waits for its turn. So the loop itself sends what a verb has to say, and goes on with the verb when it
finds that the replies are there. Only to connect, which may have to look up a name, there is a thread.

Claims and changes (confirm, release, extend, start) go on side by side, on one connection, in the order in which they
were sent: so while memcached looks at what has come, it is told what was handled. Of each kind there is one call under
way. A confirm may overtake nothing but claims, and claims wait for a release that came before them.

To connect, all calls must be over: a new connection makes older tokens worthless, and a verb must not find one halfway.
"""

from __future__ import annotations

import asyncio
import logging
import select
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from nsqdedupe.calls import Call, Gathered, Results, Then, Verb, attempt, failed
from nsqdedupe.errors import StoreError
from nsqdedupe.memcached.link import Link
from nsqdedupe.memcached.servers import Exchange, Steps, begin, end
from nsqdedupe.memcached.session import Session
from nsqdedupe.memcached.streaming import Stream, call_weakly
from nsqdedupe.memcached.wire import Talk
from nsqdedupe.offload import on_loop, running_loop

logger = logging.getLogger(__name__)

Begin = Callable[[Sequence[Any]], Steps[Sequence[Any]]]
"""What a verb consists of."""


class OnLoop:
    """Calls the verbs of a store in memcached from one event loop.

    What is submitted in one turn of the loop, and while a call of its kind is under way, gathers: all of one verb
    becomes the next call of it. When the loop has stopped, as when a reader is closed after it, calls are waited for:
    what was handled shall be known to others, and nobody else is left to be told.

    Args:
        session: whom to ask, by servers that `Servers.twin` has made.

        steps: what each verb consists of.

        claim: the verb that may go on beside others.

        confirm: the verb that claims need not wait for.

        after: called on the loop after results were given out.
    """

    waits = True

    def __init__(
        self, session: Session, steps: Mapping[Verb, Begin], claim: Verb, confirm: Verb, after: Callable[[], None]
    ) -> None:
        self._session = session
        self._servers = session.servers
        self._steps = steps
        self._claim = claim
        self._confirm = confirm
        self._after = after
        self._gathered = Gathered()
        self._runs: dict[bool, _Run] = {}
        """What is under way: claims at True, changes at False."""
        self._streams: dict[Link, Stream] = {}
        self.loop: asyncio.AbstractEventLoop | None = None
        """The one that runs it now."""
        self._woken = False
        self._going = False
        self._finishing = False
        self._timer: asyncio.TimerHandle | None = None
        self._dialler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nsqdedupe-connect")
        self._dialling: Future[None] | None = None
        self._closed = False

    def __del__(self) -> None:
        self.close()

    def submit(self, verb: Verb, items: Sequence[Any], then: Then, /) -> None:
        """Have a verb called soon; ``then`` runs on the loop. Does not block, unless no loop runs."""
        self._gathered.add(verb, items, then)
        loop = running_loop()
        if loop is not self.loop:
            self._move(loop)
        if loop is None:
            self._finish()
        elif not self._woken:
            self._woken = True
            loop.call_soon(self._wake)

    def forget(self, fingerprints: Iterable[bytes]) -> None:
        """Nothing is held of these any more. From any thread; does not block."""
        self._on_loop(lambda: self._session.forgotten(fingerprints))

    def close(self) -> None:
        """Hang up. From any thread; does not block."""
        self._on_loop(self._hang_up)

    def _on_loop(self, call: Callable[[], None]) -> None:
        """Now, or if another thread runs the loop, when that comes to it."""
        loop = self.loop
        if loop is not None and loop.is_running() and loop is not running_loop():
            on_loop(loop, call)
        else:
            call()

    def _hang_up(self) -> None:
        self._closed = True
        self._servers.hang_up()

    def _move(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Go on by another loop, or by none."""
        self.loop = loop
        self._woken = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for stream in self._streams.values():
            stream.listen(loop)
        for run in self._runs.values():
            run.move(loop)
        if loop is not None and self._runs:
            self._watch(loop)
        self._tell_when_dialled()

    # -- calls -----------------------------------------------------------------------------------

    def _wake(self) -> None:
        self._woken = False
        self._go_on()

    def _go_on(self, *, dialled: bool = False) -> None:
        """Begin what can be begun."""
        if self._dialling is not None:
            return
        if not dialled and not self._closed:
            away = [link for link in self._servers.links if not link.good() and link.reach.due()]
            if away:
                if not self._runs:
                    self._dial(away)
                return
        if not self._going:  # else who has begun a call that is over already goes on
            self._going = True
            try:
                while self._begin_some():
                    pass
            finally:
                self._going = False

    def _begin_some(self) -> bool:
        begun = held_back = False
        for verb in self._gathered.verbs():
            claims = verb == self._claim
            if claims in self._runs:
                held_back = held_back or verb != self._confirm
            elif not (claims and held_back):
                self._begin(verb, claims=claims)
                begun = True
        return begun

    def _begin(self, verb: Verb, *, claims: bool) -> None:
        call = self._gathered.take(verb)
        if self._closed:
            error = StoreError("the store is closed, and cannot be used any more; make another")
            call.hand_out(*failed(error, call.items))
            self._after()
        else:
            self._runs[claims] = run = _Run(self, call, self._steps[verb](call.items), claims=claims)
            run.advance()

    def ended(self, run: _Run, results: Results) -> None:
        """A call is over: begin the next one, and give out what this one brought."""
        del self._runs[run.claims]
        if self._gathered:
            self._go_on()
        run.call.hand_out(*results)
        self._after()

    # -- talks -----------------------------------------------------------------------------------

    def exchange(self, run: _Run, exchange: Exchange) -> dict[Link, Talk]:
        """Send what a call has to say; the talks that this takes."""
        talks = begin(exchange)
        run.deadline = time.monotonic() + self._servers.timeout
        return talks

    def send(self, run: _Run, link: Link, talk: Talk) -> None:
        """Send one of them."""
        if talk.connection.fileno() < 0:  # it was closed for what another call was told
            talk.error = ConnectionError("closed the connection")
            run.heard(link, talk)
            return
        stream = self._streams.get(link)
        if stream is None or stream.ended:
            stream = self._streams[link] = Stream(link, talk)
            stream.listen(self.loop)
        stream.send(talk, run)
        if self._timer is None and self.loop is not None:
            self._watch(self.loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look at what is overdue when the first may be."""
        left = min(run.deadline for run in self._runs.values()) - time.monotonic()
        self._timer = loop.call_later(max(0.0, left), call_weakly, weakref.ref(self), OnLoop._look)

    def _look(self) -> None:
        self._timer = None
        self._give_up_overdue()
        if self._runs and self.loop is not None:
            self._watch(self.loop)

    def _give_up_overdue(self) -> None:
        """End what was not answered in time. What has come by now counts, even if this process had no turn before."""
        now = time.monotonic()
        for stream in list(self._streams.values()):
            stream.give_up(now, self._servers.timeout)

    # -- connecting ------------------------------------------------------------------------------

    def _dial(self, links: Sequence[Link]) -> None:
        try:
            future = self._dialler.submit(_connect, links)
        except RuntimeError:  # no more threads can be had, or the interpreter is about to end
            _connect(links)
            future = Future()
            future.set_result(None)
        self._dialling = future
        self._tell_when_dialled()

    def _tell_when_dialled(self) -> None:
        loop, future = self.loop, self._dialling
        if loop is not None and future is not None:
            future.add_done_callback(lambda future: on_loop(loop, self._dialled, future))

    def _dialled(self, future: Future[None]) -> None:
        if future is self._dialling:  # else it was waited for
            self._dialling = None
            if self._closed:
                self._servers.hang_up()
            self._go_on(dialled=True)

    # -- without a loop --------------------------------------------------------------------------

    def _finish(self) -> None:
        """Have all that was submitted done. Blocks."""
        if self._finishing:
            return  # what results have led to is seen to where they were given out
        self._finishing = True
        try:
            while self._gathered or self._runs:
                if self._dialling is not None:
                    wait([self._dialling])
                    self._dialled(self._dialling)
                elif not self._runs:
                    self._go_on()
                else:
                    self._wait()
        finally:
            self._finishing = False

    def _wait(self) -> None:
        """Do what the loop would do next."""
        for run in list(self._runs.values()):
            if run.resting is not None:
                time.sleep(run.resting)
                run.advance()
                return
        poll = select.poll()
        streams = {stream.number: stream for stream in self._streams.values() if not stream.ended}
        for number, stream in streams.items():
            poll.register(number, select.POLLIN if stream.sent else select.POLLIN | select.POLLOUT)
        left = min(run.deadline for run in self._runs.values()) - time.monotonic()
        events = poll.poll(max(0.0, left) * 1000)
        for number, event in events:
            if event & select.POLLOUT:
                streams[number].write()
            streams[number].read()
        if not events:
            self._give_up_overdue()


class _Run:
    """A call of a verb that is under way."""

    def __init__(self, owner: OnLoop, call: Call, steps: Steps[Sequence[Any]], *, claims: bool) -> None:
        self.call = call
        self.claims = claims
        self.deadline = 0.0
        """When its servers must have answered."""
        self.resting: float | None = None
        """Seconds that it lets pass now."""
        self._owner = owner
        self._steps = steps
        self._exchange: Exchange | None = None
        self._open = 0
        self._error: Exception | None = None
        self._timer: asyncio.TimerHandle | None = None

    def advance(self) -> None:
        """Take the next steps, up to one that has to be waited for, or to the end."""
        self.resting = self._timer = None
        steps = self._steps
        try:
            while True:
                error, self._error = self._error, None
                step = next(steps) if error is None else steps.throw(error)
                if not isinstance(step, Exchange):
                    self._rest(step)
                    return
                if self._send(step):
                    return
        except StopIteration as stop:
            found = stop.value
            self._owner.ended(self, attempt(lambda _: found, self.call.items))
        except Exception as failure:  # noqa: BLE001 - told by the ledger
            self._owner.ended(self, failed(failure, self.call.items))

    def _rest(self, seconds: float) -> None:
        self.resting = seconds
        self.deadline = time.monotonic() + seconds
        self.move(self._owner.loop)

    def move(self, loop: asyncio.AbstractEventLoop | None) -> None:
        """Go on by another loop, or by none."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.resting is not None and loop is not None:
            self._timer = loop.call_later(self.resting, self.advance)

    def _send(self, exchange: Exchange) -> bool:
        """Begin an exchange; whether it has to be waited for."""
        self._exchange = exchange
        talks = self._owner.exchange(self, exchange)
        self._open = len(talks) + 1  # as long as not all are begun
        for link, talk in talks.items():
            self._owner.send(self, link, talk)
        self._open -= 1
        return self._open > 0

    def heard(self, link: Link, talk: Talk) -> None:
        """One of its talks is over, with replies or an error."""
        assert self._exchange is not None  # noqa: S101 - it was sent
        try:
            end(self._exchange, link, talk)
        except Exception as error:  # noqa: BLE001 - it ends the call
            self._error = error
        self._open -= 1
        if not self._open:
            self.advance()


def _connect(links: Sequence[Link]) -> None:
    """Connect to these. Blocks."""
    for link in links:
        try:
            link.ready()
        except Exception as error:
            logger.exception("memcached could not be connected to")
            link.lose(f"{link.name}: {error!r}")
