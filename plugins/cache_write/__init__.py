"""CacheWrite."""
