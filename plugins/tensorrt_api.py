"""The one place that imports TensorRT: production `tensorrt`, or `tensorrt_rtx`, which builds plans without a GPU.

Both have the same interface, so the rest of the package is handed a `TensorRT` and never asks which one it is,
except for what a target is.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_trt.configs.errors import BackendError

TENSORRT, TENSORRT_RTX = "tensorrt", "tensorrt_rtx"

BACKENDS: Mapping[str, str] = {
    TENSORRT: "pip install tensorrt-cu13 (from NVIDIA's package index)",
    TENSORRT_RTX: "pip install 'engram-trt[tensorrt-rtx]'",
}
"""Back ends by name, and how to install each."""

TESTED_MAJOR = {TENSORRT: 11, TENSORRT_RTX: 1}

KNOWN_TARGETS: Mapping[str, tuple[int, ...]] = {
    TENSORRT: (75, 80, 86, 89, 90, 100, 103, 120, 121),
    TENSORRT_RTX: (75, 80, 86, 89, 120, 121),
}
"""Compute capabilities a back end can build for."""

_RTX_LINKS = ("libtensorrt_rtx.so", "libtensorrt_onnxparser_rtx.so")


@dataclass(frozen=True, slots=True)
class TensorRT:
    """A loaded TensorRT.

    Attributes:
        backend: a key of `BACKENDS`.
        module: the Python module.
        version: its version.
    """

    backend: str
    module: Any
    version: str

    @property
    def dtypes(self) -> dict[str, Any]:
        """Dtype names of the contracts -> TensorRT's data types."""
        kinds = self.module.DataType
        return {
            "bool": kinds.BOOL,
            "int8": kinds.INT8,
            "int32": kinds.INT32,
            "int64": kinds.INT64,
            "float32": kinds.FLOAT,
            "bfloat16": kinds.BF16,
        }

    def dtype_name(self, dtype: Any) -> str:
        """The contracts' name of a data type; TensorRT's own where they have none."""
        return {value: name for name, value in self.dtypes.items()}.get(dtype, str(dtype).rpartition(".")[2])


def load(backend: str) -> TensorRT:
    """Import a back end.

    Raises:
        BackendError: no such back end, it is not installed, or its generation is not the tested one.
    """
    if backend not in BACKENDS:
        raise BackendError(
            "--backend", found=repr(backend), expected=" or ".join(BACKENDS), remedy="Name one of these."
        )
    try:
        module = importlib.import_module(backend)
    except (ImportError, OSError) as error:
        raise BackendError(
            f"back end {backend}",
            found=f"a module that cannot be imported ({error})",
            expected=f"TensorRT with its libraries: {BACKENDS[backend]}",
            remedy="Install it, or choose another back end.",
        ) from None
    version = str(module.__version__)
    if int(version.partition(".")[0]) != TESTED_MAJOR[backend]:
        raise BackendError(
            f"back end {backend}",
            found=f"version {version}",
            expected=f"version {TESTED_MAJOR[backend]}.x",
            remedy=f"{BACKENDS[backend]}, in a version of that generation.",
        )
    return TensorRT(backend=backend, module=module, version=version)


def parser_environment(backend: str, folder: Path) -> dict[str, str]:
    """Environment of a process that parses ONNX files.

    The ONNX parser of TensorRT-RTX opens the library by a name without version as soon as a graph holds a
    plugin, and aborts the process where that name is missing; the wheel ships the versioned name only. So links
    are put into `folder`, and the loader is told to look there.

    Args:
        backend: a key of `BACKENDS`.
        folder: exists and is writable.

    Raises:
        BackendError: the folder is not writable, or the wheel holds no library.
    """
    if backend != TENSORRT_RTX:
        return {}
    libraries = _rtx_library_folder()
    for name in _RTX_LINKS:
        source = next(iter(sorted(libraries.glob(f"{name}*"))), None)
        if source is None:
            raise BackendError(
                str(libraries), found=f"no {name}", expected="the wheel's libraries", remedy=BACKENDS[backend]
            )
        link = folder / name
        try:
            link.unlink(missing_ok=True)
            link.symlink_to(source)
        except OSError as error:
            raise BackendError(
                str(link),
                found=f"a folder that refuses ({error.strerror})",
                expected=f"a link to {source}, by which TensorRT-RTX's parser finds its library",
                remedy="Make the folder writable, or put that link beside the library.",
            ) from None
    inherited = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": f"{folder}:{inherited}" if inherited else str(folder)}


def require_parser(api: TensorRT) -> None:
    """Check that the ONNX parser will find its library; without it, it would abort the process.

    Raises:
        BackendError: the process was started without `parser_environment`.
    """
    if api.backend != TENSORRT_RTX:
        return
    try:
        ctypes.CDLL(_RTX_LINKS[0])
    except OSError:
        raise BackendError(
            "TensorRT-RTX's ONNX parser",
            found=f"no {_RTX_LINKS[0]} on the loader's path",
            expected="a link to the wheel's versioned library",
            remedy="Build with `engram-trt build`, which sets such a link for its builders.",
        ) from None


def _rtx_library_folder() -> Path:
    try:
        package = importlib.import_module("tensorrt_rtx_libs")
    except ImportError:
        package = load(TENSORRT_RTX).module
    return Path(str(package.__file__)).resolve().parent
