"""The HTTP server that an nsqd asks whom to let in: real, small, and told by the test what to answer."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class AuthServer:
    """Knows secrets, and what each allows.

    Its port stays its own while it is away.
    """

    def __init__(self) -> None:
        self.allowed: dict[str, dict[str, Any]] = {}
        """What is answered to each secret."""
        self.asked: list[dict[str, str]] = []
        """What nsqds have asked."""
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._holder.getsockname()[1]}"
        self._server: ThreadingHTTPServer | None = None

    def allow(
        self, secret: str, *, topic: str = ".*", channel: str = ".*", ttl: int = 60, may: str = "subscribe"
    ) -> None:
        """From now on a secret gives these permissions (words, separated by spaces) for ``ttl`` seconds."""
        permissions = {"topic": topic, "channels": [channel], "permissions": may.split()}
        self.allowed[secret] = {"ttl": ttl, "identity": "tester", "authorizations": [permissions]}

    def start(self) -> None:
        """Answer from now on."""
        auth = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                query = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
                auth.asked.append(query)
                answer = json.dumps(auth.allowed.get(query.get("secret", ""), {"ttl": 60})).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        host, _, port = self.address.partition(":")
        self._server = ThreadingHTTPServer((host, int(port)), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """Be away: nobody listens there."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def close(self) -> None:
        """Be gone for good."""
        self.stop()
        self._holder.close()


@contextlib.contextmanager
def auth_server() -> Iterator[AuthServer]:
    """One that answers."""
    server = AuthServer()
    server.start()
    try:
        yield server
    finally:
        server.close()
