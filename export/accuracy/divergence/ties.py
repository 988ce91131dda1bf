"""Discrete choices that may go either way: entries, candidate blocks and experts whose scores are as good as equal.

Two correct back ends differ in the last bits of a score, and then choose differently where two scores are closer
than that. What such a token computes afterwards is different and yet not wrong. The scores are the eager module's,
on the reference's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from engram_trt.configs.tensors import StageSpec
from engram_trt.export.accuracy.divergence.deviation import root_mean_square
from engram_trt.export.accuracy.divergence.places import Places
from engram_trt.export.accuracy.divergence.stepping import RESIDENT_LIKE
from engram_trt.export.modeling.probe import Recorder
from engram_trt.export.torch_runner import TorchBackend, TorchStageRunner, tensor_of
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.stage_runners.contract import Array

SCORES_OF = {"topk_indices": "index_scores", "candidate_blocks": "block_scores"}
"""Published list -> the probe with the scores it was chosen by."""

GATE = "ffn.gate"
"""Module that scores the experts, in a layer's stage that chooses them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """Scores of one stage's choices in one step.

    Args:
        scores: probe name or `experts` -> [batch, tokens, options]; -inf for what cannot be chosen.
        experts_per_token: how many experts a token gets.
    """

    scores: Mapping[str, Array]
    experts_per_token: int

    def experts_tied(self, places: Places, tie: float) -> npt.NDArray[np.bool_]:
        """Tokens whose last chosen and first rejected expert are as good as equal: bool [n]."""
        if "experts" not in self.scores:
            return np.zeros(places.rows.shape, dtype=np.bool_)
        scores = places.of(self.scores["experts"])
        if scores.shape[1] <= self.experts_per_token:
            return np.zeros(places.rows.shape, dtype=np.bool_)
        ordered = -np.sort(-scores, axis=1)
        gap = ordered[:, self.experts_per_token - 1] - ordered[:, self.experts_per_token]
        return gap <= tie * root_mean_square(scores)

    def lists_tied(
        self, name: str, reference: Array, found: Array, places: Places, tie: float
    ) -> npt.NDArray[np.bool_]:
        """Tokens whose lists differ only in entries of as good as equal scores: bool [n].

        Args:
            name: a published list.
            reference, found: int32 [n, k], -1 for none.
            places: of the tokens.
            tie: accepted gap, relative to the root mean square of the scores.
        """
        tied = np.zeros(reference.shape[0], dtype=np.bool_)
        if SCORES_OF.get(name) not in self.scores:
            return tied
        scores = places.of(self.scores[SCORES_OF[name]])
        finite = scores[np.isfinite(scores)]
        allowed = tie * root_mean_square(finite)
        for token in np.flatnonzero((reference != found).any(axis=1)):
            left = set(reference[token].tolist()) - set(found[token].tolist())
            right = set(found[token].tolist()) - set(reference[token].tolist())
            if len(left) != len(right) or max(right | left) >= scores.shape[1] or min(right | left) < 0:
                continue
            row = scores[token]
            tied[token] = max(row[i] for i in left) - min(row[i] for i in right) <= allowed
        return tied


class Explainer:
    """Runs eager stages on given inputs to see the scores behind their choices.

    Args:
        engine: of the eager modules.
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine.backend, TorchBackend):
            raise TypeError("scores are seen in the eager modules only")
        self._backend = engine.backend
        self._runners = {runner.spec.name: runner for runner in engine.runners}
        self._experts = engine.config.n_activated_experts

    @torch.no_grad()
    def choices(self, stage: StageSpec, inputs: Mapping[str, Array]) -> Choices:
        """Scores of a stage's choices.

        Args:
            stage: a stage of the chain.
            inputs: its carried inputs, and the tables' row ids of an Engram layer; weights among them replace
                the checkpoint's.
        """
        runner = self._runners[stage.name]
        if not isinstance(runner, TorchStageRunner) or not _has_gate(runner.module):
            return Choices(scores={}, experts_per_token=self._experts)
        gates: list[tuple[Tensor, Tensor]] = []
        hook = runner.module.get_submodule(GATE).register_forward_hook(
            lambda _module, _inputs, output: gates.append(output)
        )
        try:
            with Recorder().recording() as recorder:
                runner.module(self.tensors(stage, inputs), tuple(spec.name for spec in stage.outputs))
        finally:
            hook.remove()
        scores = {name: recorder.values[name].float().numpy() for name in SCORES_OF.values() if name in recorder.values}
        batch, tokens = inputs["hidden_states"].shape[:2]
        for unbiased, bias in gates:
            scores["experts"] = (unbiased + bias).float().numpy().reshape(batch, tokens, -1)
        return Choices(scores=scores, experts_per_token=self._experts)

    def module(self, stage: str) -> nn.Module:
        """The eager module of a stage."""
        runner = self._runners[stage]
        if not isinstance(runner, TorchStageRunner):
            raise TypeError(f"{stage} is not run by an eager module")
        return runner.module

    def tensors(self, stage: StageSpec, inputs: Mapping[str, Array]) -> dict[str, Tensor]:
        """Copies of the inputs as a module takes them, weights included."""
        tensors = {}
        for spec in stage.inputs:
            if spec.role == "resident" and spec.name not in inputs:
                tensors[spec.name] = tensor_of(self._backend.resident(stage, spec.name))
            else:
                values = torch.from_numpy(np.array(inputs[spec.name]))
                floats = spec.dtype == "bfloat16"
                tensors[spec.name] = values.to(torch.bfloat16) if floats else values
        return tensors


def _has_gate(module: nn.Module) -> bool:
    return any(name == GATE for name, _ in module.named_modules())


def inputs_for_eager(feed: Mapping[str, Array], engram_ids: Array | None) -> dict[str, Array]:
    """A feed with the row ids, which a back end that stages rows replaces by its own numbering."""
    name = RESIDENT_LIKE[0]
    return dict(feed) if engram_ids is None else {**feed, name: engram_ids}
