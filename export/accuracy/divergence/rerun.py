"""Run one stage of a back end on given inputs, beside the session it belongs to."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from engram_trt.configs.tensors import TensorSpec
from engram_trt.export.accuracy.divergence.stepping import StageCall
from engram_trt.runtime.stage_runners.contract import Array, Backend, View


def rerun_stage(call: StageCall, backend: Backend, feed: Mapping[str, Array]) -> dict[str, Array]:
    """What a stage computes from another side's inputs.

    States are written before they are read, so a state from after the step serves as well as one from before it.

    Args:
        call: the stage as bound in this step; its weights, and staged Engram rows, are used as they are.
        backend: of the stage.
        feed: carried inputs by name; weights among them replace the stage's own.

    Returns:
        output name -> copy.
    """
    views: dict[str, View] = {}
    for spec in call.spec.inputs:
        views[spec.name] = call.views[spec.name]
        if spec.name in feed:
            values = feed[spec.name]
            views[spec.name] = _fresh(spec, values.shape, backend)
            views[spec.name].write(values)
    for spec in call.spec.outputs:
        if spec.alias is not None:
            views[spec.name] = views[spec.alias]
        else:
            views[spec.name] = _fresh(spec, call.views[spec.name].shape, backend)
    call.runner.bind(views)()
    return {spec.name: np.array(views[spec.name].read()) for spec in call.spec.outputs}


def _fresh(spec: TensorSpec, shape: tuple[int, ...], backend: Backend) -> View:
    return backend.allocate(spec.dtype, math.prod(shape)).view(shape)
