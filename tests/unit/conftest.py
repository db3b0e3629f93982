"""Fixtures for unit tests."""

from __future__ import annotations

import pytest
from beginning import Begin

from nsqdedupe.eager import starter


@pytest.fixture
def begin() -> Begin:
    """What begins coroutines on this Python."""
    return starter()
