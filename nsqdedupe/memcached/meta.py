"""The replies of memcached to a pipeline of meta commands (``ms``, ``mg``, ``md``), read by their lengths.

Every command of ours asks for a reply, or is *quiet*: then memcached says nothing of its success, and anything else is
told with the number that the command gave, as ``EX O17``. The pipeline ends with ``mn``, so that all replies come in
the order of their commands, and then ``MN``. Anything else means that replies and commands cannot be matched any more:
then all that was read is worth nothing, and the connection must be closed, or a later pipeline would read what belongs
to this one. So the replies are handed out only when the last one is there.

A value may hold any bytes, also those that end a line or a pipeline: nothing is ever searched for in one.
"""

from __future__ import annotations

from nsqdedupe.errors import StoreError

CRLF = b"\r\n"
FINISH = b"mn\r\n"
"""The command that ends a pipeline."""

FINISHED = b"MN\r\n"
"""Its reply."""

LONGEST_LINE = 2048
LARGEST_VALUE = 1 << 27
"""Bytes. memcached takes no item larger than half of its memory, by default none above 1 MB."""

READS, WRITES, QUIET = b"r", b"w", b"q"
"""What a command is: ``mg`` reads, ``ms`` and ``md`` write; a quiet one is an ``ms`` with the flags ``q`` and ``O<n>``,
where ``n`` counts the quiet ones of a pipeline from 0. One letter for each stands for a pipeline."""

_READ, _QUIET = READS[0], QUIET[0]
_WRITTEN = frozenset(code + rest for code in (b"HD", b"NS", b"EX", b"NF") for rest in (b"", b" "))
_WITHOUT_VALUE = {_READ: frozenset((b"EN", b"EN ")), WRITES[0]: _WRITTEN, _QUIET: _WRITTEN}

Reply = tuple[bytes, bytes | None]
"""The line without its end, and the value that followed it."""

_DONE_QUIETLY: Reply = (b"HD", None)


class MisreadError(StoreError):
    """What came is not what memcached answers to meta commands.

    Attributes:
        transient: it is memcached's word for a trouble that may pass (no memory, too many connections).
    """

    def __init__(self, what: bytes) -> None:
        super().__init__(f"answered {what[:80]!r}")
        self.transient = what.startswith((b"SERVER_ERROR ", b"ERROR Too many open connections"))


class Replies:
    """Collects the replies of one pipeline, which may come in pieces of any size.

    Args:
        kinds: `READS`, `WRITES` or `QUIET` for each command, in order, ``mn`` not among them.
    """

    def __init__(self, kinds: bytes) -> None:
        self._kinds = kinds
        self._found: list[Reply] = []
        self._rest = b""
        self.beyond = b""
        """What came after the last reply: it belongs to the next pipeline, if there is one."""

    def feed(self, data: bytes) -> list[Reply] | None:  # noqa: C901, PLR0912 - one loop, which every reply goes through
        """Take what came; all replies, once the last one is there: one for each command, quiet ones included.

        Raises:
            MisreadError: it is no reply, or one too many or too few.
        """
        buffer = self._rest + data if self._rest else data
        found, find, kinds = self._found, buffer.find, self._kinds
        start, at, count = 0, len(self._found), len(self._kinds)
        while at < count:
            end = find(CRLF, start)
            if end < 0:
                break
            line, after = buffer[start:end], end + 2
            kind = kinds[at]
            if kind == _QUIET:
                self._pass_quiet(line)
                at = len(found)
                if at == count:
                    break
                kind = kinds[at]
            code = line[:3]
            if code in _WITHOUT_VALUE[kind]:
                found.append((line, None))
                start = after
            elif code == b"VA " and kind == _READ:
                digits = line.split(b" ", 2)[1]
                size = int(digits) if digits.isdigit() else -1
                if not 0 <= size <= LARGEST_VALUE:
                    raise MisreadError(line)
                stop = after + size
                if len(buffer) < stop + 2:
                    break
                if buffer[stop : stop + 2] != CRLF:
                    raise MisreadError(buffer[stop : stop + 2])
                found.append((line, buffer[after:stop]))
                start = stop + 2
            else:
                raise MisreadError(line)
            at += 1
        self._rest = rest = buffer[start:]
        if at == count:
            if rest.startswith(FINISHED):
                self.beyond = rest[len(FINISHED) :]
                return found
            if not FINISHED.startswith(rest):
                raise MisreadError(rest)
            return None
        if len(rest) > LONGEST_LINE and CRLF not in rest[:LONGEST_LINE]:
            raise MisreadError(rest)
        return None

    def _pass_quiet(self, line: bytes) -> None:
        """Note the success of the quiet commands before the one that a line is about."""
        found, kinds = self._found, self._kinds
        number = line.partition(b" O")[2]
        if number:
            quiet = [position for position, kind in enumerate(kinds) if kind == _QUIET]
            until = quiet[int(number)] if number.isdigit() and int(number) < len(quiet) else -1
        else:
            loud = (position for position in range(len(found), len(kinds)) if kinds[position] != _QUIET)
            until = len(kinds) if line == b"MN" else next(loud, -1)
        passed = kinds[len(found) : until]
        if until < len(found) or passed.strip(QUIET):
            raise MisreadError(line)
        found += [_DONE_QUIETLY] * len(passed)


def flags_of(line: bytes) -> dict[bytes, bytes]:
    """The flags of a reply by their letter, for example ``{b"c": b"17", b"t": b"3601"}``."""
    words = line.split(b" ")[2 if line[:2] == b"VA" else 1 :]
    return {word[:1]: word[1:] for word in words}
