"""Shared machinery of the Triton kernels: launch plans, ahead-of-time compilation, the launcher, rounding helpers."""
