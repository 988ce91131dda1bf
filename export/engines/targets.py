"""Targets of a build: which GPUs the back end, the kernels and the machine allow."""

from __future__ import annotations

import re
from collections.abc import Sequence

from engram_trt.configs.errors import BackendError
from engram_trt.plugins.tensorrt_api import KNOWN_TARGETS, TENSORRT_RTX
from engram_trt.plugins.trt_plugins import KERNEL_TARGETS

_TARGET = re.compile(r"sm_?(\d{2,3})")


def parse_targets(backend: str, given: Sequence[str], local: int | None) -> tuple[int, ...]:
    """Compute capabilities out of `--target` values.

    Args:
        backend: TensorRT's module name.
        given: values such as "sm_89,sm_120", one or more; empty for the default.
        local: compute capability of this machine's GPU; None without one.

    Returns:
        ascending; by default the local GPU's, or all that can be built for without one.

    Raises:
        BackendError: not a target, or one that the back end or the kernels do not know, or that cannot be built
            for on this machine.
    """
    known = tuple(sorted(set(KNOWN_TARGETS[backend]) & set(KERNEL_TARGETS)))
    names = [name.strip() for value in given for name in value.split(",") if name.strip()]
    if given and not names:
        raise _refused("nothing", known)
    if not names:
        return _default(backend, known, local)
    found = set()
    for name in names:
        match = _TARGET.fullmatch(name)
        sm = int(match.group(1)) if match is not None else None
        if sm not in known:
            raise _refused(f"{name!r}, which {_why(backend, sm)}", known)
        found.add(sm)
    targets = tuple(sorted(sm for sm in found if sm is not None))
    if backend != TENSORRT_RTX and targets != (local,):
        raise BackendError(
            "--target",
            found=", ".join(name_of(sm) for sm in targets),
            expected=f"{name_of(local)}, the GPU of this machine" if local else "a machine with a GPU",
            remedy="TensorRT builds for the GPU it runs on: build there, or use --backend tensorrt_rtx.",
        )
    return targets


def name_of(sm: int) -> str:
    """The name of a target."""
    return f"sm_{sm}"


def _default(backend: str, known: tuple[int, ...], local: int | None) -> tuple[int, ...]:
    if local is not None and local in known:
        return (local,)
    if backend == TENSORRT_RTX:
        return known
    raise BackendError(
        "--target",
        found=f"a GPU of {name_of(local)}" if local else "no GPU in this machine",
        expected=f"one of {', '.join(map(name_of, known))}",
        remedy="TensorRT builds for the GPU it runs on: build there, or use --backend tensorrt_rtx.",
    )


def _why(backend: str, sm: int | None) -> str:
    if sm is None:
        return "is no target"
    if sm not in KNOWN_TARGETS[backend]:
        return f"{backend} cannot build for"
    return "has no kernels here"


def _refused(found: str, known: tuple[int, ...]) -> BackendError:
    return BackendError(
        "--target",
        found=found,
        expected=f"targets out of {', '.join(map(name_of, known))}",
        remedy="Name targets as in --target sm_89,sm_120.",
    )
