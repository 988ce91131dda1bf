"""A back end that shows what passes between stages, and can put stored tensors in their place.

It stands in front of another back end, so that the session, the caches and the binding are the ones in use.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import StageSpec
from engram_trt.export.modeling.probe import Recorder
from engram_trt.export.stages.block import block_name
from engram_trt.export.stages.interfaces import EMBEDDING, ENGRAM_HASH, HEAD
from engram_trt.export.torch_runner import TorchBackend
from engram_trt.runtime.stage_runners.contract import Array, Backend, Buffer, Run, StageRunner, View

_GOLDEN_NAMES = {"hidden_states_out": "h", "pre_mix_out": "pre_mix", "topk_indices": "topk"}


class TappedRunner(StageRunner):
    """A stage whose outputs are copied after each run."""

    def __init__(self, inner: StageRunner, backend: TappedBackend) -> None:
        self.spec, self.inner, self.backend = inner.spec, inner, backend

    def bind(self, views: Mapping[str, View]) -> Run:
        inner, outputs = self.inner.bind(views), [spec for spec in self.spec.outputs if spec.alias is None]

        def run() -> None:
            for name, values in self.backend.feeds.get(self.spec.name, {}).items():
                views[name].write(values)
            inner()
            copies = {spec.name: torch.from_numpy(views[spec.name].read().copy()) for spec in outputs}
            self.backend.keep(self.spec, copies)

        return run


class TappedBackend(Backend):
    """Delegates to another back end.

    Args:
        inner: does the work.
        config: the model.
    """

    def __init__(self, inner: Backend, config: ModelConfig) -> None:
        self.inner, self.config, self.name = inner, config, inner.name
        self.feeds: dict[str, dict[str, Array]] = {}
        """Stage -> input -> values written into it before the stage runs."""
        self._values: dict[str, Tensor] = {}

    def allocate(self, dtype: str, num_elements: int) -> Buffer:
        return self.inner.allocate(dtype, num_elements)

    def load(self, spec: StageSpec) -> StageRunner:
        return TappedRunner(self.inner.load(spec), self)

    def resident(self, spec: StageSpec, binding: str) -> View:
        return self.inner.resident(spec, binding)

    def close(self) -> None:
        self.inner.close()

    def start(self) -> None:
        """Forget the last step; a back end of eager modules gets a new recorder."""
        self._values = {}
        if isinstance(self.inner, TorchBackend):
            self.inner.recorder = Recorder()

    def values(self) -> dict[str, Tensor]:
        """What the last step computed, under the golden files' names."""
        probed = {}
        if isinstance(self.inner, TorchBackend) and self.inner.recorder is not None:
            probed = self.inner.recorder.values
        return {**probed, **self._values}

    def feed(self, streams: list[Tensor], mixes: list[Tensor]) -> None:
        """Give every block, and the head, the stored output of the block before it.

        Args:
            streams: per layer, [batch, tokens, hc_mult, dim].
            mixes: per layer, [batch, tokens, hc_mult].
        """
        readers = [block_name(layer) for layer in range(1, self.config.n_layers)] + [HEAD]
        for reader, stream, mix in zip(readers, streams, mixes, strict=True):
            self.feeds[reader] = {"hidden_states": stream.float().numpy(), "pre_mix": mix.float().numpy()}

    def keep(self, spec: StageSpec, outputs: Mapping[str, Tensor]) -> None:
        """Note a stage's outputs."""
        if spec.name == ENGRAM_HASH:
            rows = [outputs[f"engram_ids_{layer}"] for layer in self.config.engram_layer_ids]
            self._values["hash_ids"] = torch.stack(rows, dim=2)
        elif spec.name == EMBEDDING:
            self._values["embed_merged_streams"] = outputs["hidden_states"]
        elif spec.name == HEAD:
            self._values["logits"] = outputs["logits"]
        else:
            for name, value in outputs.items():
                self._values[f"layers.{spec.layer_id}.{_GOLDEN_NAMES.get(name, name)}"] = value
