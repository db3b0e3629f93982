"""Fixtures for tests of stores."""

from __future__ import annotations

import socket

import pytest


@pytest.fixture
def nameless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network in which no name under .invalid is ever looked up: what DNS says of it, and when, is no concern."""
    real = socket.getaddrinfo

    def look_up(host: str, *rest: object, **options: object) -> object:
        if host.endswith(".invalid") and len(host) < 64:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return real(host, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("socket.getaddrinfo", look_up)
