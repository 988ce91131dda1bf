"""`engram-trt bench`."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.cli import Command


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="DIR", type=Path, help="an exported artefact")
    parser.add_argument(
        "--backends", metavar="NAMES", default="onnxruntime,torch", help="default onnxruntime,torch; ratios to the last"
    )
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=128, help="of one prefill (default 128)")
    parser.add_argument("--decode-steps", metavar="N", type=int, default=60, help="per back end (default 60)")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="where the checkpoint is now")
    parser.add_argument("--json", action="store_true", help="JSON lines, the machine first")


def _run(arguments: argparse.Namespace) -> int:
    from engram_trt.runtime.artifact import Artifact
    from engram_trt.runtime.bench import BenchConfig, bench_chain, bench_engram
    from engram_trt.runtime.machine import machine_facts

    config = BenchConfig(prompt_tokens=arguments.prompt_tokens, decode_steps=arguments.decode_steps)
    if min(config.prompt_tokens, config.decode_steps) < 1:
        raise RequestError(
            "--prompt-tokens, --decode-steps", found="less than 1", expected="1 or more", remedy="Give another number."
        )
    artifact = Artifact.open(arguments.artifact, arguments.checkpoint)
    _print({"benchmark": "machine", **machine_facts()}, as_json=arguments.json)
    with ExitStack() as stack:
        names = arguments.backends.split(",")
        engines = {name: stack.enter_context(artifact.engine(name)) for name in names}
        for result in bench_chain(engines, config):
            _print(result, as_json=arguments.json)
        for result in bench_engram(artifact, engines[names[0]]):
            _print(result, as_json=arguments.json)
    return 0


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    title = f"{result['benchmark']} {result.get('backend', '')}".strip()
    facts = {key: value for key, value in result.items() if key not in ("benchmark", "backend", "stage_ms")}
    print(f"{title:24} " + "  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)


COMMAND = Command(
    summary="measure prefill, decode, hash and gather",
    description=(
        "Tokens per second of the chain and of the eager modules, taking turns step by step in one run; the share\n"
        "of a decode step spent outside the stage runs; rates of the Engram hash and gather."
    ),
    examples="""
    engram-trt bench artefact
    engram-trt bench artefact --backends onnxruntime --json
    """,
    configure=_configure,
    run=_run,
)
