"""Comparisons against golden vectors and between back ends."""
