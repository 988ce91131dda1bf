"""`engram-trt bench`."""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.cli import Command
from engram_trt.runtime.verification import add_verify_option

if TYPE_CHECKING:
    from engram_trt.runtime.artifact import Artifact
    from engram_trt.runtime.bench import BenchConfig
    from engram_trt.runtime.bench_pipeline import Recorder
    from engram_trt.runtime.engine import Engine


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="DIR", type=Path, help="an exported artefact")
    parser.add_argument(
        "--backends", metavar="NAMES", default="onnxruntime,torch", help="default onnxruntime,torch; ratios to the last"
    )
    parser.add_argument("--prompt-tokens", metavar="N", type=int, default=128, help="of one prefill (default 128)")
    parser.add_argument("--decode-steps", metavar="N", type=int, default=60, help="per back end (default 60)")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="where the checkpoint is now")
    parser.add_argument("--deployment", metavar="FILE", type=Path, help="on which devices stages run")
    parser.add_argument("--sequences", metavar="N", type=int, help="instead: N sequences in flight, each a micro-batch")
    parser.add_argument("--timeline", metavar="FILE", type=Path, help="with --sequences: write a Chrome trace")
    add_verify_option(parser)
    parser.add_argument("--json", action="store_true", help="JSON lines, the machine first")


def _run(arguments: argparse.Namespace) -> int:
    from engram_trt.runtime.artifact import Artifact
    from engram_trt.runtime.bench import BenchConfig
    from engram_trt.runtime.bench_pipeline import LocalRecorder
    from engram_trt.runtime.distributed.ranks import launched_rank
    from engram_trt.runtime.generate_command import deployment_of

    config = BenchConfig(prompt_tokens=arguments.prompt_tokens, decode_steps=arguments.decode_steps)
    numbers = {
        "--prompt-tokens": arguments.prompt_tokens,
        "--decode-steps": arguments.decode_steps,
        "--sequences": 1 if arguments.sequences is None else arguments.sequences,
    }
    for option, number in numbers.items():
        if number < 1:
            raise RequestError(option, found=str(number), expected="1 or more", remedy="Give another number.")
    names = arguments.backends.split(",")
    rank = launched_rank()
    if rank is not None:
        from engram_trt.runtime.distributed.launch import LaunchRequest, run_ranked

        request = LaunchRequest(
            command="engram-trt bench",
            artifact=arguments.artifact,
            checkpoint=arguments.checkpoint,
            backend=names[0],
            deployment=arguments.deployment,
            verify=arguments.verify,
        )
        return run_ranked(rank, request, lambda _, engine, recorder: _in_flight(arguments, engine, recorder))
    artifact = Artifact.open(arguments.artifact, arguments.checkpoint, arguments.verify)
    deployment = deployment_of(artifact, arguments.deployment)
    wanted = names if arguments.sequences is None else names[:1]
    with ExitStack() as stack:
        engines = {name: stack.enter_context(artifact.engine(name, deployment=deployment)) for name in wanted}
        if arguments.sequences is not None:
            return _in_flight(arguments, engines[names[0]], LocalRecorder(engines[names[0]]))
        return _side_by_side(arguments, artifact, engines, config)


def _side_by_side(
    arguments: argparse.Namespace, artifact: Artifact, engines: dict[str, Engine], config: BenchConfig
) -> int:
    from engram_trt.runtime.bench import bench_chain, bench_engram, bench_load
    from engram_trt.runtime.machine import machine_facts

    _print({"benchmark": "machine", **machine_facts()}, as_json=arguments.json)
    for name, engine in engines.items():
        _print(bench_load(artifact, name, engine), as_json=arguments.json)
    for result in bench_chain(engines, config):
        _print(result, as_json=arguments.json)
    for result in bench_engram(artifact, next(iter(engines.values()))):
        _print(result, as_json=arguments.json)
    return 0


def _in_flight(arguments: argparse.Namespace, engine: Engine, recorder: Recorder) -> int:
    from engram_trt.runtime.bench_pipeline import bench_pipeline
    from engram_trt.runtime.machine import machine_facts
    from engram_trt.runtime.timeline import write_chrome_trace

    _print({"benchmark": "machine", **machine_facts()}, as_json=arguments.json)
    sequences = arguments.sequences or recorder.num_ranks
    results = bench_pipeline(engine, recorder, sequences, arguments.prompt_tokens, arguments.decode_steps)
    for result, spans in results:
        _print(result, as_json=arguments.json)
        if spans and arguments.timeline is not None:
            write_chrome_trace(spans, arguments.timeline)
    return 0


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    title = f"{result['benchmark']} {result.get('backend', '')}".strip()
    facts = {
        key: value for key, value in result.items() if key not in ("benchmark", "backend", "stage_ms", "stage_bytes")
    }
    print(f"{title:24} " + "  ".join(f"{key} {value}" for key, value in facts.items()), flush=True)


COMMAND = Command(
    summary="measure prefill, decode, hash and gather",
    description=(
        "Tokens per second of the chain and of the eager modules, taking turns step by step in one run; the share\n"
        "of a decode step spent outside the stage runs; rates of the Engram hash and gather. With --sequences, or\n"
        "under torchrun: sequences in flight over several devices or processes, and how much of the time each\n"
        "computes, waits for rows, moves tensors, or has nothing to do."
    ),
    examples="""
    engram-trt bench artefact
    engram-trt bench artefact --backends onnxruntime --json
    torchrun --nproc-per-node 2 .venv/bin/engram-trt bench artefact --sequences 4 --timeline trace.json
    """,
    configure=_configure,
    run=_run,
)
