"""Run a small stage-like module through a back end, for vectors of single ops.

A module takes a dictionary of tensors and returns the tensors that are asked for, like a stage. Through torch it is
called; for ONNX Runtime it is traced as stages are, gets the function bodies of its ops, and runs alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec, TensorSpec
from engram_trt.export.onnx_export import IR_VERSION
from engram_trt.export.passes.cleanup import drop_untyped_values
from engram_trt.export.passes.functions import FunctionLibrary
from engram_trt.export.tracing import trace_stage, weight_tensors
from engram_trt.plugins.float_tables import TORCH_DTYPES

Inputs = Mapping[str, Tensor]
_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


_MARK = "result_"


class OpModule(nn.Module):
    """A module with named inputs and outputs.

    Attributes:
        symbols: input name -> extents, an int where fixed and a symbol of `export/tracing.py` where not.
        results: names of the outputs.
        settings: whatever else the graph depends on; modules that agree in all of this and in the shapes of their
            weights share a graph.
    """

    symbols: Mapping[str, tuple[str | int, ...]]
    results: tuple[str, ...]
    settings: tuple[Hashable, ...] = ()

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name."""
        raise NotImplementedError

    def forward(self, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
        """As a stage's; a traced output's name is marked, so that no value inside the graph shares it."""
        computed = self.compute(dict(inputs))
        return tuple(computed[name.removeprefix(_MARK)] for name in outputs)


class Runner(ABC):
    """A way to run an `OpModule`."""

    name: str

    @abstractmethod
    def run(self, module: OpModule, config: ModelConfig, inputs: Inputs) -> dict[str, Tensor]:
        """Outputs by name.

        Args:
            module: with its weights.
            config: sizes of the ops' operands.
            inputs: one tensor per name of `module.symbols`.
        """


class TorchRunner(Runner):
    """Calls the module."""

    name = "torch"

    @torch.no_grad()
    def run(self, module: OpModule, config: ModelConfig, inputs: Inputs) -> dict[str, Tensor]:
        copies = {name: inputs[name].clone() for name in module.symbols}
        return dict(zip(module.results, module(copies, module.results), strict=True))


class OnnxRunner(Runner):
    """Traces the module once and runs its graph; float32 only."""

    name = "onnxruntime"

    def __init__(self) -> None:
        self._sessions: dict[Hashable, Any] = {}

    def run(self, module: OpModule, config: ModelConfig, inputs: Inputs) -> dict[str, Tensor]:
        key = _structure(module, inputs)
        if key not in self._sessions:
            self._sessions[key] = _open_session(module, config, inputs)
        session = self._sessions[key]
        feeds = {name: inputs[name].contiguous().numpy() for name in module.symbols}
        feeds |= {name: weight.detach().contiguous().numpy() for name, weight in weight_tensors(module).items()}
        wanted = {item.name for item in session.get_inputs()}
        values = session.run(
            [f"{_MARK}{name}" for name in module.results], {name: feeds[name] for name in feeds if name in wanted}
        )
        return {name: torch.from_numpy(value) for name, value in zip(module.results, values, strict=True)}


def runner_for(backend: str) -> Runner:
    """The runner of a back end's name."""
    return OnnxRunner() if backend == OnnxRunner.name else TorchRunner()


def onnx_model(module: OpModule, config: ModelConfig, inputs: Inputs) -> Any:
    """The module's graph with the bodies of its ops; weights are inputs."""
    model = trace_stage(_spec(module, inputs), module)
    drop_untyped_values(model)
    FunctionLibrary(config, "float32").attach(model)
    model.ir_version = IR_VERSION
    return model


def _structure(module: OpModule, inputs: Inputs) -> Hashable:
    weights = ((name, tuple(weight.shape), weight.dtype) for name, weight in weight_tensors(module).items())
    symbols = ((name, shape, inputs[name].dtype) for name, shape in module.symbols.items())
    return (type(module), module.settings, module.results, tuple(symbols), tuple(weights))


def _open_session(module: OpModule, config: ModelConfig, inputs: Inputs) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    content = onnx_model(module, config, inputs).SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _spec(module: OpModule, inputs: Inputs) -> StageSpec:
    def tensor(name: str, shape: Sequence[str | int], dtype: str) -> TensorSpec:
        return TensorSpec(name=name, dtype=dtype, shape=tuple(shape), role="activation")

    return StageSpec(
        name=type(module).__name__,
        kind=type(module).__name__,
        inputs=tuple(tensor(name, shape, _DTYPES[inputs[name].dtype]) for name, shape in module.symbols.items()),
        # Only the names of outputs matter to a trace.
        outputs=tuple(tensor(f"{_MARK}{name}", (), "float32") for name in module.results),
    )


def fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Set parameters by name, cast to the parameter's dtype; a wrong shape is a ValueError."""
    with torch.no_grad():
        for name, values in weights.items():
            parameter = module.get_parameter(name)
            if parameter.shape != values.shape:
                raise ValueError(f"{name}: {list(values.shape)} for a parameter of {list(parameter.shape)}")
            parameter.copy_(values)


def op_config(**values: Any) -> ModelConfig:
    """A model of one layer with the given values, for modules that ask a config for their sizes."""
    plain: dict[str, Any] = {
        "vocab_size": 8,
        "dim": 2,
        "moe_inter_dim": 1,
        "n_layers": 1,
        "n_heads": 1,
        "n_routed_experts": 1,
        "n_shared_experts": 1,
        "n_activated_experts": 1,
        "score_func": "sqrtsoftplus",
        "route_scale": 1.0,
        "swiglu_limit": 0.0,
        "q_lora_rank": 1,
        "head_dim": 2,
        "rope_head_dim": 2,
        "norm_eps": 1e-20,
        "o_groups": 1,
        "o_lora_rank": 1,
        "window_size": 1,
        "compress_ratios": (0,),
        "kv_source_layers": (),
        "index_source_layers": (),
        "compress_rope_theta": 10000.0,
        "original_seq_len": 0,
        "rope_theta": 10000.0,
        "rope_factor": 1.0,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "index_n_heads": 1,
        "index_head_dim": 2,
        "index_topk": 1,
        "hc_mult": 1,
        "hc_sinkhorn_iters": 1,
        "hc_eps": 1e-6,
        "dtype": "bf16",
        "expert_dtype": None,
    }
    return ModelConfig(**(plain | values))
