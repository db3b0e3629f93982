"""Fixtures for unit tests."""

from __future__ import annotations

import pytest
from beginning import WAYS, Begin


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def begin(request: pytest.FixtureRequest) -> Begin:
    """Each way of beginning coroutines at once."""
    way: Begin = request.param()
    return way
