"""``python -m nsqdedupe``."""

from __future__ import annotations

import sys

from nsqdedupe.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
