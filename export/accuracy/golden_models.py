"""Vectors of `model/`: whole models end to end in float32, block by block in the quantised modes."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engram_trt.export.accuracy.golden_caches import MOMENTS, compare_caches
from engram_trt.export.accuracy.golden_folder import SUFFIX, GoldenFolder, model_file
from engram_trt.export.accuracy.golden_model import GoldenModel, open_session
from engram_trt.export.accuracy.golden_results import NotRun, Results, Vectors
from engram_trt.export.accuracy.golden_spans import SpanComparison, cut
from engram_trt.export.accuracy.golden_steps import (
    Span,
    chunkings,
    join,
    run_span,
    start_rows,
    tapped,
)
from engram_trt.export.accuracy.golden_tolerance import END_TO_END, LOGITS, VOID_MARGINS, distance
from engram_trt.export.accuracy.stale_keys import stale_index_keys

AS_IS = "decode_asis"
PARTS = ("prefill", "decode", "caches", "prefill_lengths", AS_IS)
NOT_RUN = {
    "spec": "the draft forward is not part of this version",
}
NO_STREAMS = "holds no streams to feed the blocks with, and end to end a model that rounds and chooses is chaotic"
AS_IS_ONLY_TORCH = "stale index keys in decode are reproduced by the eager modules only; the target is `decode`"
BFLOAT16_ONLY_TORCH = "torch only: ONNX Runtime has no bfloat16 kernels for the CPU"

Progress = Callable[[str], None]


class ModelComparison:
    """One model in one mode through one back end.

    Args:
        folder: the golden folder.
        name, mode, backend: which.
        progress: told what takes time.
    """

    def __init__(self, folder: GoldenFolder, name: str, mode: str, backend: str, progress: Progress) -> None:
        self.folder, self.name, self.mode, self.backend, self.progress = folder, name, mode, backend, progress
        self.results = Results()
        self.parts = {
            part: folder.vectors(file, backend, self.results)
            for part in PARTS
            if folder.has(file := model_file(name, f"{mode}.{part}")) and not _reason_not_run(mode, part, backend)
        }

    def run(self) -> Results:
        """Compare everything the model has in this mode."""
        self._note_inputs()
        self.model = GoldenModel.open(self.folder, self.name, self.mode)
        with tempfile.TemporaryDirectory(prefix="engram_trt_") as temporary:
            engine = self.model.engine(self.backend, Path(temporary), self.progress)
            self.session = open_session(engine)
            self.progress(f"{self.name} {self.mode} ({self.backend}): running")
            if self.mode == "f32":
                self._whole()
            else:
                self._blocks()
            for part in ("caches", "prefill_lengths"):
                if part in self.parts:
                    self.parts[part].finish()
        return self.results

    def _note_inputs(self) -> None:
        files = [model_file(self.name, "inputs"), model_file(self.name, "weights")]
        if self.mode.endswith("_q"):
            files.append(model_file(self.name, "weights_q_overlay"))
        self.results.inputs |= {file for file in files if self.folder.has(file)}

    # --- float32, end to end ------------------------------------------------------------------------------

    def _whole(self) -> None:
        model, session = self.model, self.session
        prompt, length = model.prefill_len, model.length
        start_rows(session, model)
        prefill = run_span(session, model, 0, [prompt])
        self._caches(MOMENTS[0], prompt)
        self._compare("prefill", prefill, 0, prompt)
        if length > prompt:
            decode = run_span(session, model, prompt, [1] * (length - prompt))
            self._compare("decode", decode, prompt, length)
        self._caches(MOMENTS[1], length)
        self._chunked()
        self._ragged()
        self._prefill_lengths()
        self._as_is()
        for part in ("prefill", "decode", AS_IS):
            if part in self.parts:
                self._comparison(part, 0, 0).note_rest(self.backend)

    def _as_is(self) -> None:
        """The published code's stale index keys in decode, switched on in the eager modules."""
        model, session = self.model, self.session
        if AS_IS not in self.parts or model.length <= model.prefill_len:
            return
        with stale_index_keys(session.engine):
            start_rows(session, model)
            run_span(session, model, 0, [model.prefill_len])
            span = run_span(session, model, model.prefill_len, [1] * (model.length - model.prefill_len))
        self._compare(AS_IS, span, model.prefill_len, model.length)

    def _comparison(self, part: str, start: int, stop: int, label: str = "") -> SpanComparison:
        return SpanComparison(
            vectors=self.parts[part],
            config=self.model.config,
            mode=self.mode,
            start=start,
            tokens=stop - start,
            label=label,
        )

    def _compare(self, part: str, span: Span, start: int, stop: int, label: str = "") -> None:
        """Hold positions start..stop-1 of a span against a file, if there is one."""
        if part in self.parts and start < stop:
            values = cut(span.joined(), self.model.config, span.start, start, stop)
            self._comparison(part, start, stop, label).compare(values)

    def _caches(self, moment: str, length: int) -> None:
        if "caches" in self.parts:
            compare_caches(self.parts["caches"], self.session, self.model.batch, moment, length)

    def _chunked(self) -> None:
        """Any way of cutting the tokens into steps gives what one pass gave."""
        model = self.model
        for chunks in chunkings(model.length, model.config.window_size):
            start_rows(self.session, model)
            span = run_span(self.session, model, 0, chunks)
            self._compare("prefill", span, 0, model.prefill_len, "chunked ")
            self._compare("decode", span, model.prefill_len, model.length, "chunked ")

    def _ragged(self) -> None:
        """Rows that advance at paces of their own: logits only."""
        model, cuts = self.model, chunkings(self.model.length, self.model.config.window_size)
        start_rows(self.session, model)
        plans = [list(cuts[(2 + row) % len(cuts)]) for row in range(model.batch)]
        done = [0] * model.batch
        logits: list[list[Tensor]] = [[] for _ in range(model.batch)]
        while any(plans):
            sizes = {row: plan.pop(0) for row, plan in enumerate(plans) if plan}
            step = {row: model.row_input(row, done[row], done[row] + size) for row, size in sizes.items()}
            for row, values in self.session.step(step, "all").items():
                logits[row].append(torch.from_numpy(values))
                done[row] += sizes[row]
        whole = torch.stack([torch.cat(parts) for parts in logits])
        for part, kept in (("prefill", slice(0, model.prefill_len)), ("decode", slice(model.prefill_len, None))):
            if part in self.parts:
                self.parts[part].check("logits", whole[:, kept], LOGITS, "rows apart logits")

    def _prefill_lengths(self) -> None:
        if "prefill_lengths" not in self.parts:
            return
        vectors = self.parts["prefill_lengths"]
        for name in vectors.names:
            match = re.fullmatch(r"L(\d+)\.last_logits", name)
            if match is None or not 0 < int(match[1]) <= self.model.length:
                continue
            self.session.reset()
            row = self.session.add()
            logits = self.session.step({row: self.model.row_input(0, 0, int(match[1]))})[row]
            vectors.check(name, torch.from_numpy(logits).unsqueeze(0), LOGITS)

    # --- modes that round -------------------------------------------------------------------------------

    def _blocks(self) -> None:
        """Each block gets the stored output of the one before it, in the prefill and in every step after it."""
        model, session = self.model, self.session
        start_rows(session, model)
        fed = self._fed_span("prefill", 0, [model.prefill_len], True)
        if model.length > model.prefill_len:
            self._fed_span("decode", model.prefill_len, [1] * (model.length - model.prefill_len), fed)
        if self._makes_no_choice():
            self._end_to_end()
        for part in ("prefill", "decode"):
            if part in self.parts:
                self._comparison(part, 0, 0).note_rest(self.backend)

    def _fed_span(self, part: str, start: int, chunks: list[int], caches_are_good: bool) -> bool:
        """Run and compare the steps of one file; returns whether the blocks were fed with stored streams."""
        model = self.model
        vectors = self.parts.get(part)
        fed = vectors is not None and caches_are_good and self._has_streams(vectors)
        spans: list[Span] = []
        for index, size in enumerate(chunks):
            tapped(self.session).feeds = {}
            if fed and vectors is not None:
                self._feed(vectors, 0 if part == "prefill" else index, size)
            spans.append(run_span(self.session, model, start + sum(chunks[:index]), [size]))
        if vectors is None:
            return False
        span = Span(
            values=tuple(item.values[0] for item in spans),
            starts=tuple(item.start for item in spans),
            stop=spans[-1].stop,
        )
        compare = self._comparison(part, start, span.stop)
        if fed:
            compare.compare(span.joined())
        else:
            compare.compare(span.joined(), lambda name: name in ("hash_ids", "embed", "embed_merged_streams"))
            margins = [name for name in vectors.names if name.endswith("_margin")]
            vectors.skip(
                [name for name in vectors.names if name not in margins and not self._is_smooth(name)], NO_STREAMS
            )
        return fed

    def _is_smooth(self, name: str) -> bool:
        return name == "logits" and self._makes_no_choice()

    def _has_streams(self, vectors: Vectors) -> bool:
        layers = range(self.model.config.n_layers)
        return all(f"layers.{layer}.{name}" in vectors for layer in layers for name in ("h", "pre_mix"))

    def _feed(self, vectors: Vectors, first: int, size: int) -> None:
        """Put the stored streams of some tokens in front of every block."""
        layers, kept = range(self.model.config.n_layers), slice(first, first + size)
        streams = [vectors.input(f"layers.{layer}.h")[:, kept] for layer in layers]
        mixes = [vectors.input(f"layers.{layer}.pre_mix")[:, kept] for layer in layers]
        tapped(self.session).feed(streams, mixes)

    def _makes_no_choice(self) -> bool:
        """Whether every margin of every file is infinite: rounding cannot turn anything over."""
        margins = [
            vectors.tensors[name]
            for part, vectors in self.parts.items()
            if part in ("prefill", "decode")
            for name in vectors.names
            if name.endswith("_margin")
        ]
        return bool(margins) and all(bool(torch.isinf(margin.float()).all()) for margin in margins)

    def _end_to_end(self) -> None:
        model = self.model
        start_rows(self.session, model)
        span = run_span(self.session, model, 0, [model.prefill_len, *[1] * (model.length - model.prefill_len)])
        logits = join([values["logits"] for values in span.values], "logits")
        for part, kept in (("prefill", slice(0, model.prefill_len)), ("decode", slice(model.prefill_len, None))):
            if part in self.parts and "logits" in self.parts[part]:
                vectors = self.parts[part]
                found = distance(logits[:, kept], vectors.input("logits"), END_TO_END)
                vectors.record("logits", found, END_TO_END, "end to end logits")


def compare_model(folder: GoldenFolder, name: str, mode: str, backend: str, progress: Progress) -> Results:
    """Compare a model in one mode; CheckpointError or ConfigError for a folder that does not fit together."""
    return ModelComparison(folder, name, mode, backend, progress).run()


def note_unrun_model_files(folder: GoldenFolder, name: str, backends: tuple[str, ...], results: Results) -> None:
    """List a model's files that no comparison takes, and modes a back end cannot run."""
    prefix = f"model/{name}/"
    for file in (file for file in folder.tensor_files if file.startswith(prefix)):
        stem = file.removeprefix(prefix).removesuffix(SUFFIX)
        mode, _, part = stem.partition(".")
        for backend in backends:
            reason = _reason_not_run(mode, part, backend)
            if reason:
                results.not_run.append(NotRun(file=file, backend=backend, what="", reason=reason))


def _reason_not_run(mode: str, part: str, backend: str) -> str:
    if not part:
        return ""
    if part in NOT_RUN:
        return NOT_RUN[part]
    if mode not in VOID_MARGINS or part not in PARTS:
        return "a kind of file this version does not know"
    if part == AS_IS and backend != "torch":
        return AS_IS_ONLY_TORCH
    if mode.startswith("bf16") and backend != "torch":
        return BFLOAT16_ONLY_TORCH
    return ""
