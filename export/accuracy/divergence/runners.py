"""Runners of Polygraphy: one stage under any back end, and the whole chain with its caches.

Eager modules, ONNX Runtime and TensorRT differ only in the engine they are given (`Artifact.engine(NAME)`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata

from engram_trt.configs.tensors import StageSpec
from engram_trt.export.accuracy.divergence.places import StepPlaces
from engram_trt.export.accuracy.divergence.prompts import PromptSet, chunks
from engram_trt.export.accuracy.divergence.stepping import SteppedSession
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.stage_runners.contract import NUMPY_DTYPES, Array, View

Feed = Mapping[str, Array]


class StageRunner(BaseRunner):  # type: ignore[misc]
    """One stage, fed with all its inputs but the weights (a table's rows may be fed as well).

    Args:
        engine: has the stage.
        stage: its name.
        name: of the runner; back end and stage by default.
    """

    def __init__(self, engine: Engine, stage: str, name: str | None = None) -> None:
        super().__init__(name=name or f"{engine.backend.name}-{stage}")
        self._backend = engine.backend
        self._runner = {runner.spec.name: runner for runner in engine.runners}[stage]

    @property
    def spec(self) -> StageSpec:
        return self._runner.spec

    def get_input_metadata_impl(self) -> Any:
        """Names, dtypes and shapes; symbols are dynamic."""
        metadata = TensorMetadata()
        for spec in self.spec.inputs:
            if spec.role != "resident":
                shape = tuple(None if isinstance(extent, str) else extent for extent in spec.shape)
                metadata.add(spec.name, dtype=np.dtype(NUMPY_DTYPES.get(spec.dtype, np.float32)), shape=shape)
        return metadata

    def infer_impl(self, feed_dict: Feed) -> OrderedDict[str, Array]:
        """Every output of the stage, copies; a state comes back as it is after the step."""
        views: dict[str, View] = {}
        sizes: dict[str, int] = {}
        for spec in self.spec.inputs:
            if spec.name not in feed_dict:
                views[spec.name] = self._backend.resident(self.spec, spec.name)
                continue
            values = np.asarray(feed_dict[spec.name])
            sizes |= {
                symbol: size for symbol, size in zip(spec.shape, values.shape, strict=True) if isinstance(symbol, str)
            }
            views[spec.name] = self._view(spec.dtype, values.shape)
            views[spec.name].write(values)
        for spec in self.spec.outputs:
            shape = spec.resolve(sizes)
            views[spec.name] = views[spec.alias] if spec.alias else self._view(spec.dtype, shape)
        run = self._runner.bind(views)
        started = perf_counter()
        run()
        self.inference_time = perf_counter() - started
        return OrderedDict((spec.name, np.array(views[spec.name].read())) for spec in self.spec.outputs)

    def _view(self, dtype: str, shape: tuple[int, ...]) -> View:
        return self._backend.allocate(dtype, math.prod(shape)).view(shape)


class ChainRunner(BaseRunner):  # type: ignore[misc]
    """The whole chain. It has rows, caches and a token cache; activation starts it afresh.

    A feed is one step: `token_ids` int64 [rows, tokens], -1 where a row gets nothing (behind its tokens), and
    `new_rows` bool [1], True where the rows begin. Outputs are `rows` and `positions` [n] of the real tokens,
    `logit_rows`, and `STAGE.TENSOR` of every stage, or `head.logits` alone if only logits are asked for: [n, ...], of a
    cache what the step wrote, of logits the last token of each row.

    Args:
        engine: the chain.
        name: of the runner; the back end by default.
        only_logits: leave out what passes between the stages.
    """

    def __init__(self, engine: Engine, name: str | None = None, *, only_logits: bool = False) -> None:
        super().__init__(name=name or engine.backend.name)
        self._engine, self._only_logits = engine, only_logits

    def activate_impl(self) -> None:
        """New rows, empty caches."""
        self._session: SteppedSession | None = SteppedSession(self._engine)

    def deactivate_impl(self) -> None:
        """Give the caches back."""
        self._session = None

    def get_input_metadata_impl(self) -> Any:
        """The two inputs of a feed."""
        metadata = TensorMetadata()
        metadata.add("token_ids", dtype=np.dtype(np.int64), shape=(None, None))
        metadata.add("new_rows", dtype=np.dtype(np.bool_), shape=(1,))
        return metadata

    def infer_impl(self, feed_dict: Feed) -> OrderedDict[str, Array]:
        """One step."""
        session = self._session
        if session is None:
            raise RuntimeError("not active")
        ids = feed_dict["token_ids"]
        if bool(feed_dict["new_rows"][0]):
            session.reset()
            for _ in range(ids.shape[0]):
                session.add()
        tokens = {row: values[values >= 0] for row, values in enumerate(ids) if (values >= 0).any()}
        started = perf_counter()
        step = session.open_step(tokens)
        places = StepPlaces.of(step, self._engine.config, written_only=True)
        outputs: OrderedDict[str, Array] = OrderedDict(
            rows=places.tokens.rows, positions=places.tokens.positions, logit_rows=places.selected.rows
        )
        for call in step.calls:
            call.run()
            for spec in call.spec.outputs if not self._only_logits else ():
                values = call.read(spec.name)
                outputs[f"{call.spec.name}.{spec.name}"] = places.places(spec, values.shape).of(values)
        logits = step.commit()
        if self._only_logits:
            outputs["head.logits"] = np.stack([logits[row] for row in tokens])
        self.inference_time = perf_counter() - started
        return outputs


def chain_feeds(prompts: PromptSet, engine: Engine) -> Iterator[dict[str, Array]]:
    """The steps of a comparison as feeds of a `ChainRunner`.

    Args:
        prompts: the rows.
        engine: decides how many rows run together and how long a step may be. Results of two machines can be
            compared if both have the artefact's limits.
    """
    limits = engine.deployment.limits
    for index, group in enumerate(prompts.groups(limits.max_batch)):
        longest = max(prompt.num_prompt for prompt in group)
        sizes = chunks(longest, index, engine.config, limits.max_step_tokens)
        cuts = [(sum(sizes[:number]), sum(sizes[: number + 1])) for number in range(len(sizes))]
        parts = [[prompt.ids[start : min(stop, prompt.num_prompt)] for prompt in group] for start, stop in cuts]
        for offset in range(max(prompt.num_decode for prompt in group)):
            parts.append([prompt.ids[prompt.num_prompt + offset :][:1] for prompt in group])
        for number, rows in enumerate(parts):
            ids = np.full((len(group), max(map(len, rows))), -1, dtype=np.int64)
            for row, part in enumerate(rows):
                ids[row, : len(part)] = part
            yield {"token_ids": ids, "new_rows": np.array([number == 0])}
