"""Routed experts of one layer on several devices."""
