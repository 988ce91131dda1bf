"""Reading untrusted JSON: bounded size, no duplicate keys, no NaN, plain errors instead of tracebacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from engram_trt.configs.errors import UserError

MAX_JSON_BYTES = 256 << 20


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise ValueError(f"the key {key!r} twice")
        keys[key] = value
    return keys


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"the value {text}, which is not JSON")


def parse_json_object(data: bytes, where: str, error: type[UserError]) -> dict[str, Any]:
    """Parse one JSON object.

    Args:
        data: UTF-8 text.
        where: what to name in a message.
        error: the class to raise.

    Raises:
        UserError: of the class `error`, for anything that is not one unambiguous JSON object.
    """
    remedy = "Fetch or write the file again."
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_constant=_no_constant)
    except RecursionError:
        raise error(where, found="JSON nested too deeply", expected="a flat file", remedy=remedy) from None
    except ValueError as cause:
        raise error(where, found=f"no valid JSON ({cause})", expected="JSON", remedy=remedy) from None
    if not isinstance(value, dict):
        raise error(where, found=f"a JSON {type(value).__name__}", expected="a JSON object", remedy=remedy)
    return value


def read_json_object(path: Path, error: type[UserError], *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read `path` as one JSON object of at most `max_bytes` bytes.

    Raises:
        UserError: of the class `error`, when the file cannot be read, is too large or is not a JSON object.
    """
    data = read_bytes(path, error, max_bytes=max_bytes)
    return parse_json_object(data, str(path), error)


def read_bytes(path: Path, error: type[UserError], *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read a whole small file, refusing one above `max_bytes`; errors are of the class `error`."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise error(
                str(path),
                found=f"a file of {size:,} bytes",
                expected=f"at most {max_bytes:,}",
                remedy="This is not the file it is named for; fetch it again.",
            )
        return path.read_bytes()
    except OSError as cause:
        raise error(
            str(path),
            found=f"a file that cannot be read ({cause.strerror or cause})",
            expected="a readable file",
            remedy="Check the path and its permissions.",
        ) from None
