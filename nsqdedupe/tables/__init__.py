"""Embedded tables of seen fingerprints."""
