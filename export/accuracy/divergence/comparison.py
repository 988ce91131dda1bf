"""`engram-trt compare ARTIFACT`: check the call, open both sides, compare, gather one report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from engram_trt.configs.errors import RequestError
from engram_trt.export.accuracy.divergence.bisect import bisect_stage
from engram_trt.export.accuracy.divergence.chains import Schedule, compare_chains
from engram_trt.export.accuracy.divergence.findings import Outcome
from engram_trt.export.accuracy.divergence.lockstep import Divergence, Lockstep
from engram_trt.export.accuracy.divergence.op_level import compare_ops
from engram_trt.export.accuracy.divergence.prompts import PromptSet, default_prompts, prompts_from_file
from engram_trt.export.accuracy.divergence.report import ComparisonReport
from engram_trt.export.accuracy.divergence.saved import (
    Provenance,
    compare_steps,
    load_outputs,
    run_chain,
    save_outputs,
)
from engram_trt.export.accuracy.divergence.ties import Explainer
from engram_trt.export.accuracy.divergence.tokens import chain_logits, compare_tokens
from engram_trt.export.accuracy.divergence.tolerances import artifact_digest, read_limits
from engram_trt.export.accuracy.stale_keys import stale_index_keys
from engram_trt.runtime.artifact import Artifact
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.stage_runners.contract import Array
from engram_trt.runtime.stage_runners.onnxruntime import OnnxRuntimeBackend

Level = Literal["op", "stage", "chain", "tokens"]
LEVELS: tuple[Level, ...] = ("op", "stage", "chain", "tokens")
TORCH = "torch"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRequest:
    """What to compare.

    Args:
        artifact: an exported model.
        backends: candidates.
        reference: the back end they are held against.
        level: see `LEVELS`.
        stages: names of the stages to report; empty for all.
        prompts: a text file; None for the default set.
        num_prompts: of the default set.
        num_decode: tokens fed one by one behind each prompt.
        free: the tokens behind a prompt are generated instead of given.
        bisect: go down from the first divergent stage to the op.
        keep_going: do not stop at the first difference.
        tolerances: a file of a calibration; the artefact's own by default.
        gates: look at the choice of experts as well, once per block.
        stale_keys: the eager reference reproduces the published code's stale index keys (see `stale_keys.py`).
        saved: outputs of another machine, compared instead of back ends that run here.
    """

    artifact: Artifact
    backends: tuple[str, ...] = ("onnxruntime",)
    reference: str = TORCH
    level: Level = "chain"
    stages: tuple[str, ...] = ()
    prompts: Path | None = None
    num_prompts: int = 64
    num_decode: int = 32
    free: bool = False
    bisect: bool = False
    keep_going: bool = False
    tolerances: Path | None = None
    gates: bool = False
    stale_keys: bool = False
    saved: Path | None = None


class Comparison:
    """One run of the verb.

    Args:
        request: what to compare.
        progress: told (text, done, total).

    Raises:
        RequestError: a stage that the artefact lacks, or a prompt that does not fit.
        ArtifactError, BackendError, CheckpointError: a side that cannot be opened.
    """

    def __init__(self, request: CompareRequest, progress: Progress) -> None:
        self.request, self.artifact, self.progress = request, request.artifact, progress
        _require_stages(request)
        self.limits = read_limits(self.artifact, request.tolerances)
        self.prompts = self._prompts()

    def run(self) -> ComparisonReport:
        """Open the sides, compare every back end, close them."""
        if self.request.saved is not None or self._reference_file is not None:
            return self.report(list(self._apart()))
        with ExitStack() as stack:
            reference = stack.enter_context(self.artifact.engine(self.request.reference))
            eager = reference
            if self.request.reference != TORCH:
                eager = stack.enter_context(self.artifact.engine(TORCH))
            if self.request.stale_keys:
                stack.enter_context(stale_index_keys(reference))
            outcomes = []
            for name in self.request.backends:
                with self.artifact.engine(name) as candidate:
                    outcomes.append(self.compare(name, reference, candidate, eager))
        return self.report(outcomes)

    @property
    def provenance(self) -> Provenance:
        """What saved outputs of this comparison belong to."""
        level = "tokens" if self.request.level == "tokens" else "chain"
        return Provenance(
            artifact_sha256=artifact_digest(self.artifact), prompts_sha256=self.prompts.digest, level=level
        )

    def save(self, path: Path) -> None:
        """Run the one back end and write its outputs, for a comparison elsewhere."""
        (name,) = self.request.backends
        with self.artifact.engine(name) as engine:
            save_outputs(path, name, self._live(engine), self.provenance)

    @property
    def _reference_file(self) -> Path | None:
        path = Path(self.request.reference)
        return path if path.suffix == ".json" else None

    def _live(self, engine: Engine) -> Iterator[Mapping[str, Array]]:
        return run_chain(engine, self.prompts, self.request.level == "tokens")

    def _apart(self) -> Iterator[Outcome]:
        """Compare where at least one side was computed elsewhere."""
        request = self.request
        if request.free or request.level not in ("chain", "tokens") or request.bisect:
            raise RequestError(
                "saved outputs",
                found="another level, free mode or a bisection",
                expected="--level chain or tokens, teacher-forced, without --bisect",
                remedy="Leave the options out: what was computed elsewhere cannot be run again here.",
            )
        specs = {f"{stage.name}.{spec.name}": spec for stage in self.artifact.stages for spec in stage.outputs}
        for name in (None,) if request.saved is not None else request.backends:
            with ExitStack() as stack:
                label, found = self._side(stack, request.saved, name)
                reference_name, reference = self._side(stack, self._reference_file, request.reference)
                outcome = Outcome(level=request.level, backend=label, reference=reference_name)
                compare_steps(
                    reference, found, specs, self.limits, outcome, self.progress, stop_at_first=not request.keep_going
                )
            yield outcome

    def _side(
        self, stack: ExitStack, saved: Path | None, backend: str | None
    ) -> tuple[str, Iterable[Mapping[str, Array]]]:
        if saved is not None:
            name, steps = load_outputs(saved, self.provenance)
            return f"{name} ({saved.name})", steps
        engine = stack.enter_context(self.artifact.engine(backend or TORCH))
        return backend or TORCH, self._live(engine)

    def report(self, outcomes: Sequence[Outcome]) -> ComparisonReport:
        """One report of all back ends."""
        return ComparisonReport(
            artifact=str(self.artifact.root),
            digest=artifact_digest(self.artifact),
            prompts_from=self.prompts.source,
            prompts_digest=self.prompts.digest,
            num_prompts=len(self.prompts.prompts),
            limits=self.limits,
            config=self.artifact.config,
            outcomes=tuple(outcomes),
        )

    def _prompts(self) -> PromptSet:
        request, limits = self.request, self.artifact.manifest.deployment.limits
        tokenizer = self.artifact.tokenizer()
        if request.prompts is not None:
            return prompts_from_file(request.prompts, tokenizer, limits, request.num_decode, free=request.free)
        return default_prompts(tokenizer, self.artifact.config, limits, request.num_prompts, request.num_decode)

    def compare(self, name: str, reference: Engine, candidate: Engine, eager: Engine) -> Outcome:
        """Compare one back end.

        Args:
            name: of the candidate, for the report.
            reference, candidate: the sides.
            eager: the eager modules; the reference itself if it is them.
        """
        request = self.request
        outcome = Outcome(level=request.level, backend=name, reference=request.reference)
        if request.level == "op":
            if name != OnnxRuntimeBackend.name:
                outcome.notes.append(f"ops are looked at in the exported files, under ONNX Runtime, not inside {name}")
            compare_ops(self.artifact, reference, self.prompts, self.limits, request.stages, outcome, self.progress)
        elif request.level == "tokens":
            first, second = (chain_logits(engine, self.prompts, request.free) for engine in (reference, candidate))
            limit = self.limits.of("head", reference.stages[-1].outputs[0])
            compare_tokens(first, second, limit, outcome, self.progress, len(self.prompts.prompts))
        else:
            self._chains(reference, candidate, eager, outcome)
        return outcome

    def _chains(self, reference: Engine, candidate: Engine, eager: Engine, outcome: Outcome) -> None:
        request = self.request
        # Running an eager stage once more would publish its keys once more.
        explainer = None if request.stale_keys else Explainer(eager)

        def lockstep(first: object, second: object) -> Lockstep:
            stages = frozenset(request.stages) or None
            level: Literal["chain", "stage"] = "stage" if request.level == "stage" or self.limits.rounding else "chain"
            return Lockstep(first, second, self.limits, explainer, outcome, level, stages, self._stage_files())  # type: ignore[arg-type]

        def explain(divergence: Divergence) -> None:
            if not request.bisect or explainer is None:
                return
            finding = outcome.findings[0]
            if divergence.finding.cause == "own":
                point = bisect_stage(self.artifact, explainer, divergence, self.limits)
                outcome.findings[0] = replace(finding, point=point)

        if self.limits.rounding and request.level == "chain":
            outcome.notes.append(
                "this artefact rounds to FP8 or FP4, where the last bits decide: every stage gets the reference's "
                "inputs, and a few flipped roundings are no difference"
            )
        schedule = Schedule(prompts=self.prompts, free=request.free, keep_going=request.keep_going)
        compare_chains(lockstep, reference, candidate, schedule, outcome, explain, self.progress)

    def _stage_files(self) -> dict[str, Path]:
        """Files of the blocks, where their choice of experts is asked for and can be looked at."""
        manifest = self.artifact.manifest
        if not self.request.gates or manifest.deployment.dtype != "float32":
            return {}
        return {
            record.spec.name: self.artifact.root / record.onnx.path
            for record in manifest.stages
            if record.spec.layer_id is not None
        }


def _require_stages(request: CompareRequest) -> None:
    known = [spec.name for spec in request.artifact.stages]
    unknown = [name for name in request.stages if name not in known]
    if unknown:
        raise RequestError(
            "--stages",
            found=", ".join(unknown),
            expected=f"some of {', '.join(known)}",
            remedy="Name stages of this artefact.",
        )
