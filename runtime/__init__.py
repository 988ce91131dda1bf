"""Chains exported stages with their caches and turns text into tokens and back."""
