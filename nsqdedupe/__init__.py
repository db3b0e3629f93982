"""De-duplication for NSQ consumers: publish to two nsqds, handle every message once.

The README says how to begin, docs/architecture.md how it is built.
"""

from __future__ import annotations

from nsqdedupe.errors import (
    ConfigError,
    DedupeError,
    FatalError,
    KeyExtractionError,
    MissingDependency,
    PublishError,
    StoreError,
    StoreUnavailable,
)
from nsqdedupe.fingerprint import BODY, json_field
from nsqdedupe.handler import DedupedHandler, dedupe
from nsqdedupe.ids import with_id
from nsqdedupe.message import Message
from nsqdedupe.metrics import Stats
from nsqdedupe.publisher import ReplicatedWriter
from nsqdedupe.reader import DedupeReader
from nsqdedupe.run import run
from nsqdedupe.store import Answer, Claim, Release, Store, Traits, Verdict
from nsqdedupe.stores.embedded import EmbeddedStore, MemoryStore
from nsqdedupe.stores.memcached import MemcachedStore
from nsqdedupe.stores.url import open_store
from nsqdedupe.tables.opposite_bloom import OppositeBloomFilter
from nsqdedupe.version import __version__

__all__ = [
    "BODY",
    "Answer",
    "Claim",
    "ConfigError",
    "DedupeError",
    "DedupeReader",
    "DedupedHandler",
    "EmbeddedStore",
    "FatalError",
    "KeyExtractionError",
    "MemcachedStore",
    "MemoryStore",
    "Message",
    "MissingDependency",
    "OppositeBloomFilter",
    "PublishError",
    "Release",
    "ReplicatedWriter",
    "Stats",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "Traits",
    "Verdict",
    "__version__",
    "dedupe",
    "json_field",
    "open_store",
    "run",
    "with_id",
]
