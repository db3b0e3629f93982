# ruff: noqa: INP001 - a list for mutants.py, beside it
"""Ways to break the state machine, each of which the tests must notice; `mutants.py` tries them one by one.

The first list is that of the model which explored the claim protocol, in its words. Four of its 22 do not apply
here; `mutations_memcached.py` has all but the last, for the store where they do:

- "claim deleted in the bucket's pipeline": the parts of a confirmation in process memory cannot come apart;
- "bucket read before the add, claim deleted": looking and claiming are one step;
- "bucket read before the add, DONE marker evicted": the same, and there is no marker;
- "forget races with a delayed confirm": no confirm is delayed in process memory.
"""

from __future__ import annotations

from typing import NamedTuple

ANSWERING = "nsqdedupe/answering.py"
DEDUPER = "nsqdedupe/deduper.py"
DELIVERY = "nsqdedupe/delivery.py"
EMBEDDED = "nsqdedupe/stores/embedded.py"
HANDLING = "nsqdedupe/handling.py"
KEEPER = "nsqdedupe/keeper.py"
LEDGER = "nsqdedupe/ledger.py"
OUTCOMES = "nsqdedupe/outcomes.py"
REGISTRY = "nsqdedupe/registry.py"
RUNNER = "nsqdedupe/runner.py"
SHORTCUT = "nsqdedupe/shortcut.py"
TOGETHER = "nsqdedupe/together.py"
TRACES = "nsqdedupe/traces.py"
TRANSPORT = "nsqdedupe/transport.py"

RULES = (
    "tests/unit/test_deduper_holds.py",
    "tests/unit/test_deduper_outcomes.py",
    "tests/unit/test_deduper_standbys.py",
    "tests/unit/test_deduper_leases.py",
    "tests/unit/test_deduper_elsewhere.py",
    "tests/unit/test_deduper_outages.py",
    "tests/unit/test_deduper_connections.py",
    "tests/unit/test_deduper_slow_store.py",
    "tests/unit/test_deduper_shortcut.py",
    "tests/contract/test_embedded_store.py",
    # Last, because it takes longest; its examples are the same each time.
    "tests/unit/test_deduper_properties.py",
)
"""The rules of the state machine and of its store, without servers."""

BACKOFF = (
    "tests/nsq/test_backoff.py::test_a_deferred_copy_starts_no_block",
    "tests/nsq/test_backoff.py::test_duplicates_end_no_block",
)
"""Backoff on real nsqds."""

GIVING_UP = ("tests/nsq/test_failing_handlers.py", "-k", "giving_up or cancelled")
"""What the application's hook may do, on real nsqds."""


class Edit(NamedTuple):
    """A text that is in a file exactly once, and what is put in its place."""

    file: str
    old: str
    new: str


class Mutation(NamedTuple):
    """A way to break the code."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...] = RULES
    """Arguments of pytest: which tests must notice."""


OF_THE_MODEL = (
    Mutation(
        "seen written at the claim",
        (
            Edit(
                EMBEDDED,
                "                answers.append(_NEW)\n",
                "                self.table.add_many([fingerprint])\n                answers.append(_NEW)\n",
            ),
        ),
    ),
    Mutation(
        "a standby is FINed at once",
        (Edit(DEDUPER, "self._stand_by(owners[fingerprint], delivery)", "self._outcomes.duplicates([delivery])"),),
    ),
    Mutation(
        "absence of the claim read as done",
        (
            Edit(
                EMBEDDED,
                "            if holder is None:\n",
                "            if holder is None and claim.poll:\n"
                "                answers.append(_DONE)\n"
                "                continue\n"
                "            if holder is None:\n",
            ),
        ),
    ),
    Mutation(
        "tries counted at the claim",
        (
            Edit(
                EMBEDDED,
                "                answers.append(_NEW)\n",
                "                self._tries[fingerprint] = 1\n                answers.append(_NEW)\n",
            ),
            Edit(
                EMBEDDED,
                "                self._released.discard(fingerprint)\n                answers",
                "                self._released.discard(fingerprint)\n"
                "                self._tries[fingerprint] = tries + 1\n"
                "                answers",
            ),
            Edit(EMBEDDED, "self._tries.get(fingerprint, 0) + failed", "self._tries.get(fingerprint, 0)"),
        ),
    ),
    Mutation(
        "give-up by nsqd's attempts",
        (Edit(DEDUPER, "0 < self.max_tries <= delivery.tries", "0 < self.max_tries < delivery.attempts"),),
    ),
    Mutation(
        "release without comparing",
        (
            Edit(
                EMBEDDED,
                "            mine = self._owns(claim)\n            ours.append(mine)\n            if not mine:\n",
                "            mine = claim.fingerprint in self._holders\n"
                "            ours.append(mine)\n"
                "            if not mine:\n",
            ),
        ),
    ),
    Mutation(
        "release also erases the bucket",
        (
            Edit(
                EMBEDDED,
                "        for claim, failed, hold in releases:\n",
                "        for claim, failed, hold in releases:\n"
                "            self.table.discard_many([claim.fingerprint])\n",
            ),
        ),
    ),
    Mutation(
        "ownership per copy, not per delivery",
        (
            Edit(
                EMBEDDED,
                "holder is not None and holder.nonce == claim.nonce",
                "holder is not None and holder.owner == claim.owner",
            ),
            Edit(EMBEDDED, "holder[2] == claim[2]", "holder[1] == claim[1]"),
        ),
    ),
    Mutation(
        "extend by plain touch",
        (
            Edit(
                EMBEDDED,
                "            if mine:\n                self._ends",
                "            if claim.fingerprint in self._ends:\n                self._ends",
            ),
        ),
    ),
    Mutation(
        "claims without a lease",
        (Edit(EMBEDDED, "if left <= 0 or", "if (left <= 0 and fingerprint in self._released) or"),),
    ),
    Mutation(
        "takeover does not re-read the bucket",
        (Edit(EMBEDDED, "            if seen:\n", "            if seen and claim[0] not in holders:\n"),),
    ),
    Mutation(
        "FIN before confirm",
        (
            Edit(
                OUTCOMES,
                "        ledger.confirm([delivery.claim for delivery in done if delivery.claim is not None]"
                ", confirmed)\n",
                "        confirmed([True] * len(done))\n"
                "        ledger.confirm([d.claim for d in done if d.claim is not None], lambda _: None)\n",
            ),
        ),
    ),
    Mutation(
        "stale confirm refused, copy requeued",
        (
            Edit(
                EMBEDDED,
                "add_many([claim[0] for claim in claims])",
                "add_many([claim[0] for claim in claims if self._owns(claim)])",
            ),
            Edit(
                OUTCOMES,
                "                self._events.late_confirms += len(late)\n",
                "                self._events.late_confirms += len(late)\n"
                "                for delivery in late:\n"
                "                    delivery.outcome = Outcome.CANCELLED\n",
            ),
        ),
    ),
    Mutation(
        "confirm impossible -> REQ (1 copy)",
        (
            Edit(
                LEDGER,
                "\n            then([mine is not False for mine in ours])\n",
                "\n            then([] if None in ours else ours)\n",
            ),
            Edit(
                OUTCOMES,
                "            if not all(ours):\n",
                "            if not ours:\n"
                "                for delivery in done:\n"
                "                    delivery.outcome = Outcome.CANCELLED\n"
                "            elif not all(ours):\n",
            ),
        ),
    ),
    Mutation(
        "same copy in another process: NEW at once",
        (
            Edit(
                EMBEDDED,
                "return holder.nonce[_INCARNATION] == claim.nonce[_INCARNATION] and holder.nonce < claim.nonce",
                "return holder.nonce[_INCARNATION] != claim.nonce[_INCARNATION] or holder.nonce < claim.nonce",
            ),
        ),
    ),
    Mutation(
        "at once, older delivery not fenced",
        (Edit(EMBEDDED, " and holder.nonce < claim.nonce", ""),),
    ),
    Mutation(
        "no lease check before the start",
        (
            Edit(
                DEDUPER,
                "if delivery.protected and now - delivery.claimed_at > source.lease / 2:",
                "if delivery.protected and now < delivery.claimed_at:",
            ),
        ),
    ),
    Mutation(
        "forget leaves the claim item",
        (Edit(EMBEDDED, "        for fingerprint in fingerprints:\n            self._drop(fingerprint)\n", ""),),
    ),
)

_EVENT = "nsq.event.BACKOFF if message.backoff else nsq.event.CONTINUE"
_TOLD = f"        if ran:\n            self._tell(message, {_EVENT})\n"

OF_OUR_RULES = (
    # -- hold
    Mutation(
        "hold: a failure holds nothing",
        (Edit(OUTCOMES, "delivery.delay if failed else 0.0", "0.0"),),
    ),
    Mutation(
        "hold: a cancelled run holds its message",
        (Edit(OUTCOMES, "delivery.delay if failed else 0.0", "delivery.delay"),),
    ),
    Mutation(
        "hold: every copy ends it",
        (
            Edit(
                EMBEDDED,
                "        if holder.owner != claim.owner:\n            return False\n",
                "        if holder.owner != claim.owner:\n            return claim.fingerprint in self._released\n",
            ),
        ),
    ),
    Mutation(
        "hold: one that asks again ends it",
        (Edit(EMBEDDED, "return not claim.poll", "return True"),),
    ),
    Mutation(
        "hold: nobody ends it, not even the copy that failed",
        (Edit(EMBEDDED, "return not claim.poll", "return False"),),
    ),
    Mutation(
        "hold: a delivery of before the failure ends it",
        (Edit(DEDUPER, "poll = since <= self._outcomes.failed_at or", "poll = "),),
    ),
    Mutation(
        "hold: a delivery that lay unread ends that of a failure elsewhere",
        (Edit(DEDUPER, " or self._clock() - since > JUST_NOW", ""),),
    ),
    Mutation(
        "hold: an heir ends it",
        (Edit(REGISTRY, "self.claims_for([heir], poll=True)", "self.claims_for([heir], poll=False)"),),
    ),
    Mutation(
        "hold: who waited for an owner elsewhere ends it",
        (Edit(REGISTRY, "_replace(poll=True)", "_replace(poll=False)"),),
    ),
    Mutation(
        "hold: longer than nsqd keeps a copy",
        (Edit(OUTCOMES, "min(self._delay(delivery), MAX_DELAY)", "self._delay(delivery)"),),
    ),
    Mutation(
        "hold: grows with attempts, not with tries",
        (Edit(OUTCOMES, "self.requeue_delay * (delivery.tries + 1)", "self.requeue_delay * delivery.attempts"),),
    ),
    # -- deferral
    Mutation(
        "deferral: copies of a failed message come back at once",
        (Edit(OUTCOMES, "delay + (AFTER_OTHERS if delay else 0.0) + jitter()", "jitter()"),),
    ),
    Mutation(
        "deferral: longer than nsqd keeps a copy",
        (
            Edit(
                OUTCOMES,
                "self._port.requeue(delivery, min(delay, MAX_DELAY), ran",
                "self._port.requeue(delivery, delay, ran",
            ),
        ),
    ),
    Mutation(
        "deferral: a held copy stays and takes a place",
        (
            Edit(DEDUPER, "if answer.held:\n", "if answer.held and answer.lease_left > MAX_DELAY:\n"),
            Edit(DEDUPER, "\nOUTAGE_DELAY = ", "\nMAX_DELAY = 3600.0\nOUTAGE_DELAY = "),
        ),
    ),
    Mutation(
        "deferral: a standby waits until nsqd gives it out again",
        (Edit(KEEPER, "OLD_STANDBY = 0.8", "OLD_STANDBY = 1.0"),),
    ),
    Mutation(
        "deferral: an older delivery takes the newer one back",
        (
            Edit(
                OUTCOMES,
                "if delivery.superseded or not delivery.source.open:\n            self._port.abandon",
                "if not delivery.source.open:\n            self._port.abandon",
            ),
        ),
    ),
    Mutation(
        "deferral: copies that wait may fill every place",
        (Edit(DEDUPER, "if self._room() <= 0:", "if self._room() < -self._port.waiting_limit():"),),
    ),
    Mutation(
        "deferral: a pause lets standbys take over",
        (Edit(DEDUPER, "if due and self._port.paused():", "if not due and self._port.paused():"),),
    ),
    # -- giving up
    Mutation(
        "giving up: one try too early",
        (Edit(DEDUPER, "self.max_tries <= delivery.tries", "self.max_tries <= delivery.tries + 1"),),
    ),
    Mutation(
        "giving up: one try too late",
        (Edit(DEDUPER, "self.max_tries <= delivery.tries", "self.max_tries < delivery.tries"),),
    ),
    Mutation(
        "giving up: max_tries=0 allows no try",
        (Edit(DEDUPER, "0 < self.max_tries <= delivery.tries", "self.max_tries <= delivery.tries"),),
    ),
    Mutation(
        "giving up: is not recorded",
        (Edit(DELIVERY, "CONFIRMS = (Outcome.HANDLED, Outcome.GIVEN_UP)", "CONFIRMS = (Outcome.HANDLED,)"),),
    ),
    Mutation(
        "giving up: a cancelled run costs a try",
        (Edit(OUTCOMES, "Release(delivery.claim, failed,", "Release(delivery.claim, True,"),),
    ),
    Mutation(
        "giving up: a hook that fails buries the message",
        (
            Edit(
                HANDLING,
                "            self._cancel(message, self._retry_delay)\n",
                "            self._respond(message, message.finish)\n",
            ),
        ),
        GIVING_UP,
    ),
    Mutation(
        "giving up: a hook that requeues costs a try",
        (Edit(HANDLING, "Outcome.CANCELLED if self._giving_up is message else Outcome.FAILED", "Outcome.FAILED"),),
        GIVING_UP,
    ),
    # -- backoff
    Mutation(
        "backoff: a deferral is told as a failed run",
        (Edit(OUTCOMES, "min(delay, MAX_DELAY), ran=False)", "min(delay, MAX_DELAY), ran=True)"),),
    ),
    Mutation(
        "backoff: a duplicate is told as a success",
        (Edit(OUTCOMES, "self._port.finish(deliveries, ran=False)", "self._port.finish(deliveries, ran=True)"),),
    ),
    Mutation(
        "backoff: a cancelled run is told as a failed one",
        (Edit(OUTCOMES, "ran=outcome is Outcome.FAILED)", "ran=True)"),),
    ),
    Mutation(
        "backoff: a deferral begins one",
        (Edit(ANSWERING, _TOLD, _TOLD.replace("if ran:", "if True:")),),
        BACKOFF,
    ),
    Mutation(
        "backoff: a duplicate ends one",
        (Edit(RUNNER, "if ran and self", "if self"),),
        BACKOFF,
    ),
    Mutation(
        "backoff: requeue(backoff=False) begins one",
        (Edit(ANSWERING, _TOLD, _TOLD.replace(_EVENT, "nsq.event.BACKOFF")),),
        BACKOFF,
    ),
    Mutation(
        "backoff: a failure begins none",
        (Edit(ANSWERING, _TOLD, _TOLD.replace(_EVENT, "nsq.event.CONTINUE")),),
        BACKOFF,
    ),
    Mutation(
        "backoff: a run that outlasts its delivery is told as nothing",
        (
            Edit(
                ANSWERING,
                "elif message.outcome is Outcome.FAILED:\n            self._tell(",
                "elif False:\n            self._tell(",
            ),
        ),
        ("tests/nsq/test_backoff_slow.py",),
    ),
)

_LATE = "self._outcomes.give_back([Release(delivery.claim)])"

OF_SLOW_STORES = (
    Mutation("slow store: a claim that came too late is kept", (Edit(DEDUPER, _LATE, "pass"),)),
    Mutation(
        "slow store: what went away meanwhile goes on",
        (Edit(DEDUPER, "            gone = delivery.state is _ANSWERED\n", "            gone = False\n"),),
    ),
    Mutation(
        "slow store: a lost connection's messages are run",
        (Edit(DEDUPER, "if not gone and delivery.source.open:", "if not gone:"),),
    ),
    Mutation(
        "slow store: REQ before the claim is given back",
        (Edit(OUTCOMES, "self.give_back(releases, released)", "self.give_back(releases)\n        released()"),),
    ),
    Mutation(
        "slow store: who waits asks again while it asks",
        (Edit(DEDUPER, "self._ask(due)", "self._registry.waiting.pause(due)\n            self._ask(due)"),),
    ),
    Mutation(
        "max_crashes: what comes next leaves its trace too soon",
        (Edit(TRACES, "if len(self._queue) == 1:", "if self._queue:"),),
    ),
)

_TOGETHER = "            and (not direct.known or direct.known.isdisjoint(fingerprints))\n"
_LOST = "first.source.open\n            and "

_BUSY = ("tests/nsq/test_broken_connections.py", "-k", "has_the_loop_run")
_NEVER_EMPTY = ("tests/nsq/test_bare_socket.py", "-k", "never_empty")

OF_THE_SHORTCUT = (
    Mutation(
        "shortcut: a handler is called within itself",
        (Edit(RUNNER, "        self._busy = True\n", ""),),
        _BUSY,
    ),
    Mutation(
        "shortcut: a handler that looks at the counters counts itself",
        (Edit(TOGETHER, "before = len(self._ready) + 1", "before = len(self._ready)"),),
        ("tests/unit/test_deduper_shortcut.py", "tests/unit/test_deduper_unprotected.py"),
    ),
    Mutation(
        "shortcut: what is read while the socket is never empty seems ever older",
        (Edit(TRANSPORT, "            self.seen_empty = max(self.seen_empty, self._marks[0])\n", ""),),
        _NEVER_EMPTY,
    ),
    Mutation(
        "shortcut: what is read while the socket is never empty seems younger than it is",
        (Edit(TRANSPORT, "max(self.seen_empty, self._marks[0])", "max(self.seen_empty, self._marks[-1])"),),
        _NEVER_EMPTY,
    ),
    Mutation(
        "shortcut: what others recorded meanwhile is run again",
        (
            Edit(SHORTCUT, "return self._looked_up_at != direct.changes() and", "return self._looked_up_at < 0 and"),
            Edit(SHORTCUT, "and self._looked_up_at == direct.changes()", "and self._looked_up_at != UNKNOWN"),
        ),
    ),
    Mutation(
        "shortcut: copies that come together are all run",
        (Edit(SHORTCUT, "            and len(fingerprints) == len(ready)\n", ""),),
    ),
    Mutation(
        "shortcut: who goes on has no claim",
        (Edit(SHORTCUT, "        self._direct.claim(delivery.claim)\n", ""),),
    ),
    Mutation(
        "shortcut: a hold is not seen",
        (Edit(SHORTCUT, " or fingerprint in direct.known:", ":"), Edit(SHORTCUT, _TOGETHER, "")),
    ),
    Mutation(
        "shortcut: FIN without a record",
        (Edit(SHORTCUT, "                direct.record(fingerprint, delivery.place)\n", "                pass\n"),),
    ),
    Mutation(
        "shortcut: what a lost connection leaves is run",
        (Edit(SHORTCUT, _LOST, ""),),
    ),
)

MUTATIONS = (*OF_THE_MODEL, *OF_OUR_RULES, *OF_SLOW_STORES, *OF_THE_SHORTCUT)
