"""Data loader for Polygraphy's command line: real inputs for an exported stage.

    polygraphy run artefact/stages/block_00.onnx --onnxrt --data-loader-script .../polygraphy_loader.py

`python -m engram_trt.export.accuracy.polygraphy_loader` prints this file's path. The stage is the .onnx file on
Polygraphy's command line; its inputs are captured while the chain runs the prompt that ships with the package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from engram_trt.configs.errors import RequestError
from engram_trt.export.accuracy.stage_inputs import Feed, artifact_of_stage, capture_inputs
from engram_trt.runtime.artifact import Artifact

PROMPT_FILE = Path(__file__).resolve().parent.parent / "data" / "demo_prompt.txt"


def load_data() -> Iterator[Feed]:
    """What Polygraphy calls: one dictionary of arrays per iteration."""
    stages = [Path(argument) for argument in sys.argv[1:] if argument.endswith(".onnx")]
    if not stages:
        raise RequestError(
            "polygraphy_loader",
            found="no .onnx file on the command line",
            expected="a stage of an artefact",
            remedy="Name it as in `polygraphy run artefact/stages/block_00.onnx`.",
        )
    root, stage = artifact_of_stage(stages[0])
    artifact = Artifact.open(root)
    prompt = artifact.tokenizer().encode(PROMPT_FILE.read_text(encoding="utf-8"))
    with artifact.engine() as engine:
        yield from capture_inputs(engine, prompt, stage)


if __name__ == "__main__":
    print(Path(__file__).resolve())
