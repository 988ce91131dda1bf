"""Indexer."""
