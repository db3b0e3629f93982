# ruff: noqa: INP001 - a list for mutants.py, beside it
"""Ways to break `MemcachedStore`, each of which its interleavings must notice.

The names of the first list are those of the model that explored the claim protocol. One of its orders of commands is
not here, "forget races with a delayed confirm": nothing stands against it that could be broken, so the docs say when
to forget.
"""

from __future__ import annotations

from mutations import Edit, Mutation

CLAIMING = "nsqdedupe/memcached/claiming.py"
CONFIRMING = "nsqdedupe/memcached/confirming.py"
ON_LOOP = "nsqdedupe/memcached/on_loop.py"
SESSION = "nsqdedupe/memcached/session.py"
SWAPPING = "nsqdedupe/memcached/swapping.py"

ORDERS = ("tests/stores/test_memcached_interleavings.py",)
"""Every order of the commands of two stores, on a real memcached."""

LOOPS = ("tests/stores/test_memcached_on_loop.py",)
"""Calls from an event loop."""

FAILURES = (*ORDERS, "-k", "tries")
"""Of two handlers that fail: where a mutation makes more commands, all scenes take minutes."""

_BUCKET_FIRST = (
    Edit(
        CLAIMING,
        'b"ms %b %d ME T%b c\\r\\n%b\\r\\nmg %b v c\\r\\n" % (key, ITEM_BYTES, ttls[position], value, bucket_key)',
        'b"mg %b v c\\r\\nms %b %d ME T%b c\\r\\n%b\\r\\n" % (bucket_key, key, ITEM_BYTES, ttls[position], value)',
    ),
    Edit(
        CLAIMING,
        "(WRITES + READS) * len(group)\n        met",
        "(READS + WRITES) * len(group)\n        met",
    ),
    Edit(
        CLAIMING,
        "(added, _), found in zip(groups[link], replies[::2], replies[1::2],",
        "(added, _), found in zip(groups[link], replies[1::2], replies[::2],",
    ),
)
_MARKER = 'b"ms %%b 1 C%%b T%d q O%%d\\r\\n%b\\r\\n" % (MARKER_SECONDS, DONE)'
_DELETED = (Edit(CONFIRMING, _MARKER, 'b"md %b C%b q O%d\\r\\n"'),)
_WRITES = """\
            if written == value:
                plan.append((key, members, None))
            else:
                plan.append((key, members, written))
                if key in coming or sharers.get(key, 0) > len(members):  # its token is wanted, for the next write
                    commands.append(_write(key, written, token, b"c"))
                    kinds += WRITES
                else:
                    commands.append(_write(key, written, token, b"q O%d" % quiet))
                    kinds += QUIET
                    quiet += 1
"""
_MARKS = """\
            if marking:
                for position in members:
                    if position in tokens:
                        commands.append(_MARKER % (spots[position][1], tokens[position], quiet))
                        kinds += QUIET
                        quiet += 1
"""
_HEARD = '                line = b"HD" if written is None else next(said)[0]\n'
_COUNTED = "                        ours.add(position)\n"
_MINE = "item.nonce != self._claims[position].nonce"

OF_THE_MODEL = (
    Mutation(
        "memcached: seen written at the claim",
        (
            Edit(
                CLAIMING,
                "elif won:\n                    answers[position] = _NEW\n",
                "elif won:\n"
                "                    answers[position] = _NEW\n"
                '                    link.leftovers.append(b"ms %b 8 ME\\r\\n%b\\r\\n" % spots[position][2:])\n',
            ),
        ),
        FAILURES,
    ),
    Mutation(
        "memcached: absence of the claim read as done",
        (Edit(CLAIMING, "gone.append(position)", "self.answers[position] = _DONE"),),
        ORDERS,
    ),
    Mutation(
        "memcached: tries counted at the claim",
        (Edit(CLAIMING, "owner, item.tries, item", "owner, item.tries + (item.kind == CLAIMED), item"),),
        ORDERS,
    ),
    Mutation(
        "memcached: release without comparing",
        (Edit(SWAPPING, _MINE, "self._lasting"),),
        ORDERS,
    ),
    Mutation(
        "memcached: release also erases the bucket",
        (
            Edit(
                SESSION,
                "            return self._swap([release.claim for release in batch],"
                " given_back, ttls, lasting=False)\n",
                "            fingerprints = [release.claim.fingerprint for release in batch]\n"
                "            yield from Forgetting(self.servers, self.held, self._damage, fingerprints).steps()\n"
                "            claims = [release.claim for release in batch]\n"
                "            return (yield from self._swap(claims, given_back, ttls, lasting=False))\n",
            ),
        ),
        ORDERS,
    ),
    Mutation(
        "memcached: ownership per copy, not per delivery",
        (
            Edit(SWAPPING, _MINE, "item.owner != owner_of(self._claims[position].owner)"),
            Edit(
                SWAPPING, "import CLAIMED, ITEM_BYTES, Item, parse", "import CLAIMED, ITEM_BYTES, Item, owner_of, parse"
            ),
        ),
        ORDERS,
    ),
    Mutation(
        "memcached: extend by plain touch",
        (Edit(SWAPPING, _MINE, f"(not self._lasting and {_MINE})"),),
        ORDERS,
    ),
    Mutation(
        "memcached: claims without a lease",
        (Edit(CLAIMING, "left <= 0 or", "(left <= 0 and item.kind == FREE) or"),),
        ORDERS,
    ),
    Mutation("memcached: claim deleted in the bucket's pipeline", _DELETED, ORDERS),
    Mutation("memcached: bucket read before the add, claim deleted", (*_BUCKET_FIRST, *_DELETED), ORDERS),
    Mutation("memcached: bucket read before the add, DONE marker evicted", _BUCKET_FIRST, ORDERS),
    Mutation(
        "memcached: takeover does not re-read the bucket",
        (Edit(CLAIMING, "swapped)\n                elif won:", "swapped)\n                if won:"),),
        ORDERS,
    ),
    Mutation(
        "memcached: stale confirm refused",
        (
            Edit(CONFIRMING, "if held is None or bucket is None:", "if True:"),
            Edit(
                CONFIRMING,
                "        for attempt in range(ATTEMPTS):\n            moved",
                "        for position in set(strange).difference(self._tokens):\n"
                "            self.results[position] = False\n"
                "        groups = self._servers.going(self._spots, self._tokens)\n"
                "        for attempt in range(ATTEMPTS):\n            moved",
            ),
        ),
        ORDERS,
    ),
    Mutation(
        "memcached: same copy in another process: NEW at once",
        (
            Edit(
                CLAIMING,
                "item.nonce[_INCARNATION] == claim.nonce[_INCARNATION] and item.nonce < claim.nonce",
                "item.nonce[_INCARNATION] != claim.nonce[_INCARNATION] or item.nonce < claim.nonce",
            ),
        ),
        ORDERS,
    ),
    Mutation(
        "memcached: at once, older delivery not fenced",
        (Edit(CLAIMING, " and item.nonce < claim.nonce", ""),),
        ORDERS,
    ),
    Mutation(
        "memcached: forget leaves the claim item",
        (
            Edit(
                CONFIRMING,
                '                commands += [b"md %b\\r\\n" % self._spots[position][1] for position in members]\n',
                "",
            ),
            Edit(CONFIRMING, "                for _ in members:\n                    next(said)\n", ""),
        ),
        ORDERS,
    ),
)

OF_OUR_ORDERS = (
    Mutation(
        "memcached: takeover without compare-and-swap",
        (
            Edit(CLAIMING, 'b"ms %b %d C%b T%b c\\r\\n', 'b"ms %b %d T%b c\\r\\n'),
            Edit(CLAIMING, "(key, ITEM_BYTES, token, self._ttls", "(key, ITEM_BYTES, self._ttls"),
        ),
        ORDERS,
    ),
    Mutation(
        "memcached: claim half before bucket half",
        (
            Edit(CONFIRMING, _WRITES + _MARKS, _MARKS + _WRITES),
            Edit(CONFIRMING, _HEARD, ""),
            Edit(CONFIRMING, _COUNTED, _COUNTED + _HEARD),
        ),
        ORDERS,
    ),
    Mutation(
        "memcached: confirm ends the successor's claim",
        (Edit(CONFIRMING, _MARKER, 'b"ms %%b 1 %%.0bT%d q O%%d\\r\\n%b\\r\\n" % (MARKER_SECONDS, DONE)'),),
        ORDERS,
    ),
    Mutation(
        "memcached: bucket written without compare-and-swap",
        (Edit(CONFIRMING, 'how = b"C" + token if token else b"ME"', 'how = b"MS"'),),
        ORDERS,
    ),
    Mutation(
        "memcached: a lost answer is somebody else's",
        (Edit(CLAIMING, "if item.nonce == claim.nonce:  # ours: the reply was lost\n        return True\n    ", ""),),
        ORDERS,
    ),
    Mutation(
        "memcached: what is left of a late claim goes without its token",
        (
            Edit(
                CLAIMING,
                'b"md %b C%b\\r\\n" % (self._spots[position][1], won[4:])',
                'b"md %b\\r\\n" % self._spots[position][1]',
            ),
        ),
        ORDERS,
    ),
    Mutation(
        "memcached: every copy ends a hold",
        (
            Edit(
                CLAIMING,
                "    if item.owner != owner_of(claim.owner):\n        return False\n    if",
                "    if item.owner != owner_of(claim.owner):\n        return item.kind == FREE\n    if",
            ),
        ),
        ORDERS,
    ),
    Mutation(
        "memcached: who was waiting ends a hold",
        (Edit(CLAIMING, "return not claim.poll", "return True"),),
        ORDERS,
    ),
    Mutation(
        "memcached: the copy that failed does not end its hold",
        (Edit(CLAIMING, "return not claim.poll", "return False"),),
        ORDERS,
    ),
    Mutation(
        "memcached: a bucket that has moved is taken for written",
        (Edit(CONFIRMING, "    moved.extend(members)\n", "    recorded += members\n"),),
        ORDERS,
    ),
)

OF_THE_LOOP = (
    Mutation(
        "memcached: claims overtake a release",
        (Edit(ON_LOOP, "held_back = held_back or verb != self._confirm", "held_back = False"),),
        LOOPS,
    ),
    Mutation(
        "memcached: a connection is made under a call",
        (
            Edit(
                ON_LOOP,
                "                if not self._runs:\n                    self._dial(away)\n",
                "                self._dial(away)\n",
            ),
        ),
        LOOPS,
    ),
    Mutation(
        "memcached: what came in time is not read",
        (Edit("nsqdedupe/memcached/streaming.py", "            while self.read():\n                pass\n", ""),),
        LOOPS,
    ),
)

MUTATIONS = (*OF_THE_MODEL, *OF_OUR_ORDERS, *OF_THE_LOOP)
