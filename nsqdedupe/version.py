"""The version of this package, in one place."""

from __future__ import annotations

import nsq

__version__ = "0.1.0"

USER_AGENT = f"nsqdedupe/{__version__} pynsq/{nsq.__version__}"
"""What nsqd shows of a consumer in its admin pages and stats."""
