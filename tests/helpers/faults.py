"""Plant a fault in the torch side, by qualified name and replacement; nothing is exported again.

    with planted("engram_trt.plugins.sparse_attention.reference.attend", without_sink):
        ...compare as if nothing were wrong...

The name is a function, a class attribute or a constant. Named where it is defined (`...rotary.rotate`), every module
of the package that imported it by name gets the replacement too; named where it was imported to
(`...stages.head.collapse`), only that module does. What the eager modules look up only once is replaced only if it
is planted before they are loaded: weights and buffers of modules (`rotary.inverse_frequencies`,
`weights.dequantize_fp8`, the token map) are made when an engine is opened. All the rest is looked up at every call.

A name in `engram_trt.runtime` belongs to both sides, since both run through a session. Its replacement is used where
a session over the eager modules is among the callers, and the original elsewhere.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

PACKAGE = "engram_trt"
SHARED = f"{PACKAGE}.runtime."


@contextmanager
def planted(name: str, replacement: Any) -> Iterator[None]:
    """Replace what `name` stands for while the block runs.

    Args:
        name: `engram_trt.package.module.function`, `...module.Class.method` or `...module.CONSTANT`.
        replacement: takes its place; of a method, a function with `self` in front.
    """
    owner, attribute = _resolve(name)
    original = getattr(owner, attribute)
    if name.startswith(SHARED) and callable(replacement):
        replacement = _on_the_torch_side(original, replacement)
    with ExitStack() as stack:
        stack.enter_context(patch.object(owner, attribute, replacement))
        for module in _modules_with(original) if _is_home(owner, original) else []:
            for alias in [key for key, value in vars(module).items() if value is original]:
                stack.enter_context(patch.object(module, alias, replacement))
        yield


def original(name: str) -> Any:
    """What `name` stands for now, for replacements that call it."""
    owner, attribute = _resolve(name)
    return getattr(owner, attribute)


def _resolve(name: str) -> tuple[Any, str]:
    """The object that holds the last part of a dotted name, and that part."""
    parts = name.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        for part in parts[split:-1]:
            owner = getattr(owner, part)
        return owner, parts[-1]
    raise ModuleNotFoundError(name)


def _is_home(owner: Any, value: Any) -> bool:
    """Whether a module is where a function was defined; a custom op's function counts as the op."""
    defined = getattr(value, "__module__", None) or ""
    return getattr(owner, "__name__", "") == defined or not defined.startswith(f"{PACKAGE}.")


def _modules_with(value: Any) -> list[Any]:
    """Modules of the package that hold an object under some name; numbers and strings are not followed."""
    if isinstance(value, int | float | str | bytes | bool | None):
        return []
    loaded = [module for key, module in list(sys.modules.items()) if key.startswith(f"{PACKAGE}.")]
    return [module for module in loaded if any(item is value for item in vars(module).values())]


def _on_the_torch_side(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (replacement if _torch_calls() else original)(*args, **kwargs)

    return either


def _torch_calls() -> bool:
    frame = sys._getframe(2)
    while frame is not None:
        engine = getattr(frame.f_locals.get("self"), "engine", None)
        backend = getattr(engine, "backend", None)
        if backend is not None:
            return bool(getattr(backend, "name", "") == "torch")
        frame = frame.f_back  # type: ignore[assignment]
    return False
