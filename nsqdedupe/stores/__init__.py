"""Stores: the contract of `nsqdedupe.store` over tables and servers."""
