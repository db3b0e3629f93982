"""Values that are not ours: somebody else writes under our keys, or a version of this package that is to come."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Damage:
    """Counts them, and says so once."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, key: bytes) -> None:
        """One more. It counts as nothing, and is replaced when there is something to write."""
        self.count += 1
        if self.count == 1:
            logger.warning(
                "memcached: the value of %s is not ours and counts as nothing, so that duplicates may slip; "
                "does another program write into this namespace?",
                key.decode(errors="replace"),
            )
