"""The replies of memcached to a pipeline of meta commands (``ms``, ``mg``, ``md``), read by their lengths.

Every command of ours asks for a reply, and the pipeline ends with ``mn``, so that as many replies as there were
commands come, in their order, and then ``MN``. Anything else means that replies and commands cannot be matched any
more: then all that was read is worth nothing, and the connection must be closed, or a later pipeline would read what
belongs to this one. So the replies are handed out only when the last one is there.

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

READS, WRITES = b"r", b"w"
"""What a command is: ``mg`` reads, ``ms`` and ``md`` write. One letter for each stands for a pipeline."""

_READ = READS[0]
_WITHOUT_VALUE = {_READ: frozenset((b"EN",)), WRITES[0]: frozenset((b"HD", b"NS", b"EX", b"NF"))}

Reply = tuple[bytes, bytes | None]
"""The line without its end, and the value that followed it."""


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
        kinds: `READS` or `WRITES` for each command, in order, ``mn`` not among them.
    """

    def __init__(self, kinds: bytes) -> None:
        self._kinds = kinds
        self._found: list[Reply] = []
        self._rest = b""

    def feed(self, data: bytes) -> list[Reply] | None:  # noqa: C901 - one loop, which every reply goes through
        """Take what came; all replies, once the last one is there.

        Raises:
            MisreadError: it is no reply, or one too many or too few.
        """
        buffer = self._rest + data if self._rest else data
        found, find = self._found, buffer.find
        start = 0
        for kind in self._kinds[len(found) :]:
            end = find(CRLF, start)
            if end < 0:
                break
            line, after = buffer[start:end], end + 2
            if line[:2] in _WITHOUT_VALUE[kind] and line[2:3] in (b"", b" "):
                found.append((line, None))
                start = after
            elif line[:3] == b"VA " and kind == _READ:
                size = line[3:].partition(b" ")[0]
                if not size.isdigit() or int(size) > LARGEST_VALUE:
                    raise MisreadError(line)
                stop = after + int(size)
                if len(buffer) < stop + 2:
                    break
                if buffer[stop : stop + 2] != CRLF:
                    raise MisreadError(buffer[stop : stop + 2])
                found.append((line, buffer[after:stop]))
                start = stop + 2
            else:
                raise MisreadError(line)
        self._rest = rest = buffer[start:]
        if len(found) == len(self._kinds):
            if not FINISHED.startswith(rest):
                raise MisreadError(rest)
            return found if rest == FINISHED else None
        if len(rest) > LONGEST_LINE and CRLF not in rest[:LONGEST_LINE]:
            raise MisreadError(rest)
        return None


def flags_of(line: bytes) -> dict[bytes, bytes]:
    """The flags of a reply by their letter, for example ``{b"c": b"17", b"t": b"3601"}``."""
    words = line.split(b" ")[2 if line[:2] == b"VA" else 1 :]
    return {word[:1]: word[1:] for word in words}
