"""A builder process: parse one stage, check it, build its plan, check again. Started by `process.py`."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

import onnx

from engram_trt.configs.errors import UserError
from engram_trt.export.engines.jobs import LOG_NAME, PLAN_NAME, RESULT_NAME, BuiltPlan, EngineJob
from engram_trt.export.engines.model import (
    DenseWeight,
    PluginNode,
    bind_weights,
    dense_weights,
    drop_bodies,
    plugin_nodes,
    read_model,
)
from engram_trt.export.engines.network import (
    BuildError,
    Network,
    check_bindings,
    check_configured,
    check_log,
    check_no_cache_copied,
    check_plan_plugins,
    check_plugin_types,
    check_plugins,
    plan_layers,
)
from engram_trt.export.engines.profiles import shapes_under
from engram_trt.export.engines.timing import load_timing_cache, save_timing_cache
from engram_trt.export.lifeline import end_with_parent
from engram_trt.export.passes.legality import check_legality
from engram_trt.plugins.tensorrt_api import TENSORRT_RTX, TensorRT, load, require_parser
from engram_trt.plugins.trt_classes import PluginHost
from engram_trt.plugins.trt_registration import register_plugins

_ACTIVATIONS = re.compile(r"Total Activation Memory: (\d+) bytes")
_KEPT = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO")
_LAYERS = "Layers:"


class BuildLog:
    """Messages of the builder: all but its chatter goes to a file at once, so that a killed builder leaves them."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self.kept: list[tuple[str, str]] = []
        self.layers = ""

    def take(self, severity: str, message: str) -> None:
        """Receive one message."""
        is_list = message.startswith(_LAYERS)
        if severity in _KEPT or is_list:
            self._file.write(f"{severity}: {message}\n")
            self.kept.append((severity, message))
        if is_list:
            self.layers += message

    @property
    def errors(self) -> list[str]:
        return [message for severity, message in self.kept if severity.endswith("ERROR")]


def make_logger(api: TensorRT, log: BuildLog) -> Any:
    """TensorRT's logger over a `BuildLog`; the first logger of a process is the only one used."""
    trt = api.module

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            log.take(str(severity).rpartition(".")[2], message)

    return Logger()


def build_plan(job: EngineJob) -> BuiltPlan:
    """Build one plan into the job's folder.

    Raises:
        UserError: the graph, the parser, the builder or a check refuses; nothing is left but the log.
    """
    folder, stage = Path(job.folder), job.stage
    model, weights, nodes = _prepare(job)
    api = load(job.backend)
    require_parser(api)
    log = BuildLog(folder / LOG_NAME)
    host = register_plugins(api, sms=job.targets)
    host.on_refusal = lambda reason: print(reason, file=sys.stderr, flush=True)
    if job.kernels is not None:
        _attach_kernels(job, host)
    trt = api.module
    builder = trt.Builder(make_logger(api, log))
    definition = builder.create_network(0)
    parser = trt.OnnxParser(definition, builder.logger)
    started = perf_counter()
    parsed = parser.parse(model.SerializeToString(), str(Path(job.onnx)))
    parse_ms = 1e3 * (perf_counter() - started)
    if not parsed:
        errors = [parser.get_error(n).desc() for n in range(parser.num_errors)]
        raise _refused(job, "parser", [*host.refusals, *errors])
    network = Network(api, definition)
    check_plugins(stage.name, network, nodes)
    check_plugin_types(stage.name, network, nodes)
    check_bindings(stage, network, weights)
    config = _config(job, api, builder, weights)
    started = perf_counter()
    plan = builder.build_serialized_network(definition, config)
    build_ms = 1e3 * (perf_counter() - started)
    if plan is None:
        raise _refused(job, "builder", [*host.refusals, *log.errors])
    layers = _check_result(job, host, log, nodes)
    (folder / PLAN_NAME).write_bytes(memoryview(plan))
    if job.timing_cache is not None:
        save_timing_cache(Path(job.timing_cache), bytes(config.get_timing_cache().serialize()))
    return BuiltPlan(
        num_layers=definition.num_layers,
        plugin_layers=dict(Counter(node.op for node in nodes)),
        configured=dict(Counter(op for op, _ in host.configured)),
        plan_layers=layers,
        parse_ms=parse_ms,
        build_ms=build_ms,
        activation_bytes=max((int(b) for _, m in log.kept for b in _ACTIVATIONS.findall(m)), default=0),
    )


def _prepare(job: EngineJob) -> tuple[onnx.ModelProto, tuple[DenseWeight, ...], tuple[PluginNode, ...]]:
    path = Path(job.onnx)
    model = read_model(path)
    if job.check_legality:
        check_legality(model, job.stage.name)
    weights = dense_weights(model, path, Path(job.data))
    if job.bake_weights:
        weights = ()
    bind_weights(model, weights)
    if not job.keep_bodies:
        drop_bodies(model)
    return model, weights, plugin_nodes(model)


def _config(job: EngineJob, api: TensorRT, builder: Any, weights: tuple[DenseWeight, ...]) -> Any:
    trt = api.module
    config = builder.create_builder_config()
    # Float32 means float32: the tolerances are float32's.
    config.clear_flag(trt.BuilderFlag.TF32)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    for name, profile in job.profiles.items():
        shapes = builder.create_optimization_profile()
        for tensor in job.stage.inputs:
            ranges = shapes_under(profile, tensor.shape)
            if any(isinstance(extent, str) for extent in tensor.shape):
                shapes.set_shape(tensor.name, *ranges)
                if tuple(tuple(shape) for shape in shapes.get_shape(tensor.name)) != ranges:
                    raise _refused(job, f"profile {name}", [f"{tensor.name} cannot range over {ranges}"])
        if config.add_optimization_profile(shapes) < 0:
            raise _refused(job, f"profile {name}", ["the profile is not valid"])
    if job.backend == TENSORRT_RTX:
        config.num_compute_capabilities = len(job.targets)
        for index, sm in enumerate(job.targets):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
    if job.timing_cache is not None:
        path = Path(job.timing_cache)
        cache = config.create_timing_cache(load_timing_cache(path))
        if not config.set_timing_cache(cache, False):
            raise _refused(job, "timing cache", [f"{path} is of another GPU or version: delete it"])
    return config


def _check_result(job: EngineJob, host: PluginHost, log: BuildLog, nodes: tuple[PluginNode, ...]) -> int:
    stage = job.stage
    check_log(stage.name, (message for severity, message in log.kept if severity != "VERBOSE"))
    check_configured(stage.name, nodes, host.configured)
    layers = plan_layers(log.layers)
    if layers:
        check_plan_plugins(stage.name, layers, nodes, len(job.profiles))
        for profile in job.profiles.values():
            fixed = {symbol: r[2] for symbol, r in profile.items() if r[0] == r[2]}
            check_no_cache_copied(stage, layers, fixed)
    return len(layers)


def _attach_kernels(job: EngineJob, host: PluginHost) -> None:
    """Production builders run plugins on the GPU to time them."""
    from engram_trt.export.engines.kernels import read_kernels
    from engram_trt.plugins.trt_launch import KernelLauncher
    from engram_trt.runtime.cuda_driver import CudaDriver

    driver = CudaDriver.open()
    library = read_kernels(Path(str(job.kernels)))
    register_plugins(host.api, launcher=KernelLauncher(library, driver, driver.compute_capability))


def _refused(job: EngineJob, who: str, reasons: list[str]) -> BuildError:
    distinct = list(dict.fromkeys(reason.strip() for reason in reasons))
    return BuildError(
        f"{job.stage.name}: {who}",
        found="; ".join(distinct)[:2000] or "a refusal without a message",
        expected=f"a stage that {job.backend} can build",
        remedy=f"The builder's log is {Path(job.folder) / LOG_NAME}.",
    )


def main(path: str) -> int:
    """Run the job in a JSON file and write its result; 0 unless the job itself cannot be read."""
    end_with_parent()
    job = EngineJob.from_json(json.loads(Path(path).read_text()))
    try:
        result: dict[str, Any] = {"built": build_plan(job).to_json()}
    except UserError as error:
        result = {
            "error": {
                "where": error.where,
                "found": error.found,
                "expected": error.expected,
                "remedy": error.remedy,
            }
        }
        with suppress(FileNotFoundError):
            (Path(job.folder) / PLAN_NAME).unlink()
    (Path(job.folder) / RESULT_NAME).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
