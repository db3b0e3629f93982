"""What a connection's IOStream must bear with, and by itself does not: pynsq's compression, and an abrupt end."""

from __future__ import annotations

import errno
import ssl

from tornado.iostream import IOStream


def mend(stream: IOStream) -> None:
    """Make a stream read on in two cases in which it would close, and close in one where it would be deaf. Idempotent.

    When part of a compressed frame has come, pynsq reports that no bytes are there, in a form in which
    tornado takes it for a failure. And when a write fails because nsqd has closed the connection, why it did
    is still to be read: the read that finds the end will close the stream. But what a decompressor cannot read
    is an error of its own kind, which nobody expects of a read.
    """
    if "read_from_fd" in vars(stream):
        return
    read, write = stream.read_from_fd, stream.write_to_fd

    def patient_read(buf: bytearray | memoryview) -> int | None:
        while True:
            try:
                return read(buf)
            except OSError as error:
                if error.args != (errno.EWOULDBLOCK,):
                    raise
            except Exception as error:
                raise OSError(f"cannot be decompressed: {error}") from error
            # What has come was taken, so this ends. TLS may hold more that the system knows nothing of.

    def patient_write(data: memoryview) -> int:
        try:
            return write(data)
        except (ConnectionError, ssl.SSLEOFError):
            return 0

    stream.read_from_fd = patient_read  # type: ignore[method-assign]
    stream.write_to_fd = patient_write  # type: ignore[method-assign]
