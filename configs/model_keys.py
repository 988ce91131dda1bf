"""The two key sets of a model config: the reference's flat one and the released, nested one (spec 1).

Both come down to one dictionary of flat names. Keys that carry no fact of the model are known and ignored
(`auto_map` names remote code, which is never run); those with a value that is
taken for granted are checked.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, NoReturn

from engram_trt.configs.errors import ConfigError
from engram_trt.configs.hf_table import HF_ALSO_CONSTANT, HF_CONSTANTS, HF_PATHS, HF_REQUIRED

# Facts that a nested section may repeat; they must agree.
_REPEATED = ("bos_token_id", "eos_token_id", "pad_token_id")
_IGNORED = ("transformers_version", "auto_map", "use_cache", "initializer_range", "_name_or_path")
_SECTIONS = (
    ("text_config",),
    ("vision_config",),
    ("quantization_config",),
    ("text_config", "rope_scaling"),
)
# Parts of the model that may be off; the first key is the switch, the others go with it.
_REQUIRED_WITH: dict[str, tuple[str, ...]] = {
    "vision_n_layers": ("vision_", "image_token_id"),
    "dspark_block_size": ("dspark_block", "dspark_noise", "dspark_target", "dspark_markov"),
    "engram_layer_ids": ("engram_",),
    "candidate_source_layer": ("candidate_",),
}


def is_hf_document(document: Mapping[str, Any]) -> bool:
    """Whether a parsed config has the released, nested layout."""
    return any(key in document for key in ("text_config", "model_type", "architectures"))


def spelled(key: str, is_hf: bool) -> str:
    """A flat name as the file at hand spells it."""
    return ".".join(HF_PATHS[key]) if is_hf and key in HF_PATHS else key


def flat_values(document: Mapping[str, Any], where: str, config_type: type[Any]) -> dict[str, Any]:
    """Bring either key set to keyword arguments of `config_type`, with the types of its fields.

    Raises:
        ConfigError: for an unknown, missing or mistyped key, and for a constant that is not the model's.
    """
    known = {item.name: item for item in fields(config_type)}
    is_hf = is_hf_document(document)
    raw = _from_hf(document, where) if is_hf else _from_flat(document, where, known)
    _drop_when_off(raw)
    _require_present(raw, known, where, is_hf)
    return {key: _typed(value, known[key], where, spelled(key, is_hf)) for key, value in raw.items()}


def hf_document(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Write flat values in the released layout."""
    document: dict[str, Any] = {}
    for path, value in HF_CONSTANTS.items():
        _put(document, path, value)
    for key, path in HF_PATHS.items():
        _put(document, path, flat[key])
    if flat["dtype"] != "fp8":
        # The released layout has no word for float weights but the absence of this section.
        del document["quantization_config"]
    for key, default in (("max_position_embeddings", None), ("gate_temp", 1.0)):
        if flat[key] == default:
            del document["text_config"][key]
    return document


def _put(document: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for section in path[:-1]:
        document = document.setdefault(section, {})
    document[path[-1]] = list(value) if isinstance(value, list) else value


def _from_flat(document: Mapping[str, Any], where: str, known: Mapping[str, Field[Any]]) -> dict[str, Any]:
    for key in document:
        if key not in known:
            _unknown(where, str(key), list(known))
    return dict(document)


def _from_hf(document: Mapping[str, Any], where: str) -> dict[str, Any]:
    leaves = _leaves(document, where)
    names = {path: key for key, path in HF_PATHS.items()}
    values: dict[str, Any] = {}
    for path, value in leaves.items():
        if path in names:
            values.setdefault(names[path], value)
        elif path in HF_CONSTANTS or path in HF_ALSO_CONSTANT:
            _check_constant(path, value, where)
        elif path[-1] in _REPEATED and path[0] == "text_config":
            _check_repeated(path, value, leaves, values, where)
        elif path[-1] not in _IGNORED:
            spellings = [".".join(known) for known in (*names, *HF_CONSTANTS)]
            _unknown(where, ".".join(path), spellings)
    _check_quantization(document, values, leaves, where)
    if "rope_scaling" not in document["text_config"] or document["text_config"]["rope_scaling"] is None:
        values |= {"original_seq_len": 0, "rope_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return values


def _leaves(document: Mapping[str, Any], where: str) -> dict[tuple[str, ...], Any]:
    """All values by path, descending into the known sections only."""
    if not isinstance(document.get("text_config"), Mapping):
        _bad(where, "text_config", "no such section", "the text model's keys", "Use the released config.json.")
    leaves: dict[tuple[str, ...], Any] = {}

    def walk(section: Mapping[str, Any], path: tuple[str, ...]) -> None:
        for key, value in section.items():
            here = (*path, str(key))
            if here not in _SECTIONS:
                leaves[here] = value
            elif isinstance(value, Mapping):
                walk(value, here)
            elif value is not None:
                _bad(where, ".".join(here), _shown(value), "a section", "Restore the section.")

    walk(document, ())
    return leaves


def _check_constant(path: tuple[str, ...], value: Any, where: str) -> None:
    expected = HF_CONSTANTS[path] if path in HF_CONSTANTS else HF_ALSO_CONSTANT[path]
    if value is None and path[-1] in ("dtype", "torch_dtype"):
        return
    if value != expected or isinstance(value, bool) != isinstance(expected, bool):
        _bad(where, ".".join(path), repr(value), repr(expected), "This is another model or format.")


def _check_repeated(
    path: tuple[str, ...],
    value: Any,
    leaves: Mapping[tuple[str, ...], Any],
    values: dict[str, Any],
    where: str,
) -> None:
    top = leaves.get((path[-1],), value)
    if value is not None and value != top:
        _bad(where, ".".join(path), repr(value), f"{top!r} as at the top level", "Make the two agree.")
    if top is not None:
        values[path[-1]] = top


def _check_quantization(
    document: Mapping[str, Any],
    values: dict[str, Any],
    leaves: Mapping[tuple[str, ...], Any],
    where: str,
) -> None:
    if document.get("quantization_config") is None:
        values |= {"dtype": "bf16", "expert_dtype": None}
        return
    if values.get("dtype") != "fp8":
        found = repr(values.get("dtype", "no such key"))
        _bad(where, "quantization_config.quant_method", found, "'fp8'", "Other formats are not supported.")
    for path in HF_REQUIRED:
        if path not in leaves:
            _bad(where, ".".join(path), "no such key", repr(HF_CONSTANTS[path]), "Restore the section.")


def _drop_when_off(raw: dict[str, Any]) -> None:
    """Forget unusable values of a vision tower that is not there: they are not to be judged."""
    if raw.get("vision_n_layers", 0) != 0:
        return
    for key in [*raw]:
        is_number = isinstance(raw[key], int | float) and not isinstance(raw[key], bool)
        if (key.startswith("vision_") or key == "image_token_id") and not is_number:
            del raw[key]


def _require_present(raw: Mapping[str, Any], known: Mapping[str, Field[Any]], where: str, is_hf: bool) -> None:
    required = [name for name, item in known.items() if item.default is MISSING]
    for switch, prefixes in _REQUIRED_WITH.items():
        value = raw.get(switch)
        is_on = bool(value) if switch != "candidate_source_layer" else isinstance(value, int) and value >= 0
        if is_on:
            required += [name for name in known if name.startswith(prefixes)]
    if raw.get("dspark_block_size"):
        required.append("n_mtp_layers")
    for name in required:
        if name not in raw and name != "vision_max_wh_ratio":
            _bad(
                where,
                spelled(name, is_hf),
                "no such key",
                "a value; the reference's defaults describe a toy model and are never assumed",
                "Use the checkpoint's own config.json.",
            )


def _typed(value: Any, item: Field[Any], where: str, key: str) -> Any:
    """Hold a JSON value to its field's annotation; an integer serves as a float, a boolean only as itself."""
    kind = str(item.type)
    if value is None and kind.endswith("| None"):
        return None
    convert, expected = _CONVERTERS[kind.removesuffix(" | None")]
    converted = convert(value)
    if converted is None:
        _bad(where, key, _shown(value), expected, "Correct the value.")
    return converted


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _as_bool(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _as_str(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _as_ints(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple) or any(_as_int(entry) is None for entry in value):
        return None
    return tuple(value)


_CONVERTERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (_as_int, "an integer"),
    "float": (_as_float, "a finite number"),
    "bool": (_as_bool, "true or false"),
    "str": (_as_str, "a string"),
    "tuple[int, ...]": (_as_ints, "a list of integers"),
}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _bad(where: str, key: str, found: str, expected: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{where}: {key}", found=found, expected=expected, remedy=remedy)


def _unknown(where: str, key: str, known: list[str]) -> NoReturn:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"Did you mean {close[0]}?" if close else "Remove it, or use a version that knows it."
    _bad(where, key, "an unknown key", "a key of the released or the reference's config", hint)
