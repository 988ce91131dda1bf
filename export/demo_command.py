"""`engram-trt demo`: the whole path on a machine with no GPU, ending in a table."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from engram_trt.runtime.cli import Command

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from engram_trt.runtime.artifact import Artifact
    from engram_trt.runtime.tokenizer import Tokenizer

PROMPT_FILE = Path(__file__).parent / "data" / "demo_prompt.txt"
TOLERANCE = 2e-3
"""Largest accepted difference of a logit between the chain and the eager modules."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One back end's run: its tokens, the logits behind each, and its speed."""

    tokens: list[int]
    logits: npt.NDArray[np.float32]
    prefill_tokens_per_s: float
    decode_tokens_per_s: float


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="DIR", type=Path, default=Path("demo"), help="work folder (default demo)")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=48, help="new tokens (default 48)")


def _run(arguments: argparse.Namespace) -> int:
    from engram_trt.configs.preset_files import deployment_preset, model_preset
    from engram_trt.export.export_command import export_bar
    from engram_trt.export.pipeline import ExportRequest, export_checkpoint
    from engram_trt.export.synth import SynthRequest, synthesize
    from engram_trt.runtime.artifact import Artifact

    checkpoint, out = arguments.out / "checkpoint", arguments.out / "artefact"
    started = perf_counter()
    if not checkpoint.exists():
        _say(f"1. A synthetic checkpoint in the released layout: {checkpoint}")
        synthesize(SynthRequest(config=model_preset("tiny"), out=checkpoint, seed=0))
    else:
        _say(f"1. The synthetic checkpoint of an earlier run: {checkpoint}")
    _say(f"2. Export to ONNX stages: {out} (a minute; each kind of layer is traced once)")
    request = ExportRequest(checkpoint=checkpoint, out=out, deployment=deployment_preset("tiny"))
    with export_bar() as progress:
        export_checkpoint(request, progress)
    export_s = perf_counter() - started
    artifact = Artifact.open(out)
    tokenizer = artifact.tokenizer()
    prompt = tokenizer.encode(PROMPT_FILE.read_text(encoding="utf-8"))
    _say(f"3. A prompt of {len(prompt)} tokens through the ONNX Runtime chain (random weights: expect no sense)\n")
    chain = run_backend(artifact, "onnxruntime", prompt, arguments.max_tokens, tokenizer)
    _say("\n4. The same with the eager torch modules")
    eager = run_backend(artifact, "torch", prompt, arguments.max_tokens, None)
    return _report(artifact, chain, eager, export_s)


def _say(text: str) -> None:
    print(text, flush=True)


def run_backend(
    artifact: Artifact, backend: str, prompt: list[int], max_tokens: int, tokenizer: Tokenizer | None
) -> RunResult:
    """Greedy decoding with one back end; text is streamed if a tokenizer is given."""
    import numpy as np

    from engram_trt.runtime.session import Session

    stream = None if tokenizer is None else tokenizer.stream()
    tokens, rows = [], []
    with artifact.engine(backend) as engine:
        session = Session(engine)
        row = session.add()
        started = perf_counter()
        logits = session.prefill(row, prompt)
        prefill_s, started = perf_counter() - started, perf_counter()
        for _ in range(max_tokens):
            rows.append(logits)
            tokens.append(int(np.argmax(logits)))
            if stream is not None:
                sys.stdout.write(stream.push(tokens[-1]))
                sys.stdout.flush()
            logits = session.step({row: tokens[-1:]})[row]
        decode_s = perf_counter() - started
    if stream is not None:
        print(stream.finish())
    return RunResult(
        tokens=tokens,
        logits=np.stack(rows),
        prefill_tokens_per_s=len(prompt) / prefill_s,
        decode_tokens_per_s=max_tokens / decode_s,
    )


def _report(artifact: Artifact, chain: RunResult, eager: RunResult, export_s: float) -> int:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    worst = float(np.abs(chain.logits - eager.logits).max())
    agrees = worst <= TOLERANCE and chain.tokens == eager.tokens
    num_bytes = sum(item.onnx.num_bytes + item.data.num_bytes for item in artifact.manifest.stages)
    table = Table(title="engram-trt demo", show_header=True)
    table.add_column("")
    for heading in ("ONNX Runtime", "eager torch", "ratio"):
        table.add_column(heading, justify="right")
    for name, ours, theirs in (
        ("prefill, tokens/s", chain.prefill_tokens_per_s, eager.prefill_tokens_per_s),
        ("decode, tokens/s", chain.decode_tokens_per_s, eager.decode_tokens_per_s),
    ):
        table.add_row(name, f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.1f}x")
    table.add_row("largest difference of a logit", f"{worst:.1e}", f"limit {TOLERANCE:.0e}", "")
    table.add_row("same tokens", "yes" if chain.tokens == eager.tokens else "NO", "", "")
    table.add_row("stages, MiB", f"{len(artifact.stages)}, {num_bytes / 2**20:.1f}", "", "")
    table.add_row("checkpoint and export, s", f"{export_s:.0f}", "", "")
    Console().print(table)
    if not agrees:
        print("The chain differs from the eager modules.", file=sys.stderr)
    return 0 if agrees else 1


COMMAND = Command(
    summary="synthetic checkpoint, export, text, comparison",
    description=(
        "Write a small synthetic checkpoint, export it, run a prompt through the ONNX Runtime chain while the\n"
        "text streams, compare with the eager torch modules, and print a table. Exit code 1 if they differ."
    ),
    examples="engram-trt demo --out demo",
    configure=_configure,
    run=_run,
)
