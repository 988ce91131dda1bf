"""`polygraphy run --engram`: real inputs for a stage, and this package's TensorRT plugins, by one flag.

Polygraphy finds this through the entry point group `polygraphy.run.plugins`.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from polygraphy.tools.args import DataLoaderArgs, RunnerSelectArgs
from polygraphy.tools.args.base import BaseArgs

from engram_trt.configs.errors import BackendError
from engram_trt.export.accuracy import polygraphy_loader
from engram_trt.plugins.trt_registration import register_plugins

BACKENDS = ("tensorrt", "tensorrt_rtx")


class EngramArgs(BaseArgs):  # type: ignore[misc]
    """
    Engram: stages of an engram-trt artefact.

    Depends on:

        - DataLoaderArgs
        - RunnerSelectArgs
    """

    def add_parser_args_impl(self) -> None:
        """Add the flag."""
        self.group.add_argument(
            "--engram",
            help="Feed what the chain feeds this stage while it reads a text, and register the plugins of engram-trt "
            "with TensorRT. The model is a stage of an artefact: ARTEFACT/stages/NAME.onnx.",
            action="store_true",
            default=None,
        )

    def parse_impl(self, args: Any) -> None:
        """Take the place of the default data loader; BackendError where TensorRT is asked for and absent."""
        if not args.engram:
            return
        loader = self.arg_groups[DataLoaderArgs]
        loader.data_loader_script = str(Path(polygraphy_loader.__file__))
        loader.data_loader_func_name = "load_data"
        if "trt" in self.arg_groups[RunnerSelectArgs].runners:
            register_installed()


def register_installed() -> None:
    """Register the plugins with the TensorRT that is there; BackendError if none is."""
    from engram_trt.plugins import tensorrt_api

    installed = [name for name in BACKENDS if importlib.util.find_spec(name) is not None]
    if not installed:
        raise BackendError(
            "polygraphy run --engram --trt",
            found="no TensorRT",
            expected=" or ".join(BACKENDS),
            remedy="Install TensorRT, or run with --onnxrt.",
        )
    register_plugins(tensorrt_api.load(installed[0]))


def argument_groups() -> list[BaseArgs]:
    """The entry point."""
    return [EngramArgs()]
