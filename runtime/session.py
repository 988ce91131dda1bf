"""`Session`: rows of a batch, their caches and the Engram token cache; everything that changes.

A step either happens or it does not. Caches are written ahead of the committed lengths, and rings have room for
what a step or a rollback leaves behind, so going back is setting lengths (see `configs/limits.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from engram_trt.configs.errors import RequestError
from engram_trt.configs.limits import COMPRESS_RATIOS, symbol_limits
from engram_trt.runtime.engine import Engine
from engram_trt.runtime.engram.staging import EngramStaging
from engram_trt.runtime.execution import CONSTANT_INPUTS, BoundChain, SessionChain, remembered
from engram_trt.runtime.local_chain import LocalChain
from engram_trt.runtime.row_snapshot import RowSnapshot
from engram_trt.runtime.state import SessionBuffers
from engram_trt.runtime.step_inputs import RowInput, StepState, check_row, step_values
from engram_trt.runtime.token_cache import TokenCache

Logits = npt.NDArray[np.float32]
Selection = Literal["last", "all"]
Tokens = RowInput | Sequence[int] | npt.NDArray[Any]

VISIBLE_STEP = 64
"""Granularity of the number of entries an indexer scores: coarse enough to stay bound over many decode steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What the rows have been fed. Replaced as a whole, so that an interrupt finds the old rows or the new ones."""

    active: tuple[bool, ...]
    lengths: npt.NDArray[np.int64]
    longest: npt.NDArray[np.int64]
    token_cache: TokenCache


class Session:
    """Mutable state over an engine.

    Rows are added, fed in steps and finished; a finished row's place is reused. Steps may hold any rows, each
    with any number of tokens up to the limit; what a row computes does not depend on the others.

    Args:
        engine: shared, not changed.
        max_batch: rows of this session, if fewer than the engine's limit: several small sessions over one engine
            are its micro-batches (see `start`).
    """

    def __init__(self, engine: Engine, max_batch: int | None = None) -> None:
        self.engine = engine
        limits = engine.deployment.limits
        num_rows = limits.max_batch if max_batch is None else min(max_batch, limits.max_batch)
        self.limits = replace(limits, max_batch=num_rows)
        self._symbol_limits = symbol_limits(engine.config, self.limits)
        opened = LocalChain if engine.open_chain is None else engine.open_chain
        self.chain: SessionChain = opened(engine, self._symbol_limits)
        history = max(engine.config.engram_max_ngram_size - 1, 0)
        self._rows = _Rows(
            active=(False,) * num_rows,
            lengths=np.zeros(num_rows, dtype=np.int64),
            longest=np.zeros(num_rows, dtype=np.int64),
            token_cache=TokenCache(num_rows, history, self.limits.max_rollback),
        )
        self._chains: dict[tuple[int, ...], BoundChain] = {}
        self.stage_seconds: dict[str, float] = {}
        """Time of each stage in the last step."""
        self.taps: dict[int, Logits] = {}
        """Row -> [tokens, targets * dim]: DSpark taps of the last step; empty where taps are off."""

    @property
    def buffers(self) -> SessionBuffers:
        """The session's tensors on the first device."""
        return self.chain.buffers

    @property
    def engram(self) -> EngramStaging | None:
        """Fetches Engram rows and counts them; None where the back end has all tables bound whole."""
        return self.chain.engram

    # --- rows ---------------------------------------------------------------------------------------------

    def add(self) -> int:
        """Take a free row; RequestError when the batch is full."""
        for row, active in enumerate(self._rows.active):
            if not active:
                self._set_row(row, active=True)
                return row
        raise RequestError(
            "session",
            found=f"{self.limits.max_batch} rows in use",
            expected=f"at most max_batch = {self.limits.max_batch}",
            remedy="Finish a row first, or export with a larger limit.",
        )

    def finish(self, row: int) -> None:
        """Give a row back."""
        self._require_active(row)
        self._set_row(row, active=False)

    def reset(self) -> None:
        """Give all rows back."""
        for row in range(self.limits.max_batch):
            self._set_row(row, active=False)

    def length(self, row: int) -> int:
        """Tokens a row has."""
        self._require_active(row)
        return int(self._rows.lengths[row])

    def rollback(self, row: int, num_tokens: int) -> None:
        """Forget a row's last tokens, as if they had not been fed.

        Raises:
            RequestError: more than the row has, or further than max_rollback behind the longest it has been.
        """
        self._require_active(row)
        length, longest = int(self._rows.lengths[row]), int(self._rows.longest[row])
        available = length - max(0, longest - self.limits.max_rollback)
        if not 0 <= num_tokens <= available:
            raise RequestError(
                f"row {row}",
                found=f"a rollback of {num_tokens} tokens",
                expected=f"0..{available} (max_rollback = {self.limits.max_rollback})",
                remedy="Start the row anew, or export with a larger limit.",
            )
        lengths, cache = self._rows.lengths.copy(), self._rows.token_cache.copy()
        lengths[row] -= num_tokens
        cache.rollback(row, num_tokens)
        self._rows = replace(self._rows, lengths=lengths, token_cache=cache)

    def snapshot(self, row: int) -> RowSnapshot:
        """Everything of a row, for `restore`; later steps do not change it."""
        self._require_active(row)
        longest = int(self._rows.longest[row])
        return RowSnapshot(
            length=int(self._rows.lengths[row]),
            longest=longest,
            token_ids=self._rows.token_cache.snapshot(row),
            states=self.chain.save_row(row, longest),
        )

    def restore(self, saved: RowSnapshot) -> int:
        """Continue a snapshot in a free row, of this session or another with the same model and limits.

        Raises:
            RequestError: the batch is full.
            ValueError: the snapshot is of other caches or limits.
        """
        row = self.add()
        try:
            self.chain.load_row(row, saved.longest, saved.states)
            lengths, longest, cache = (
                self._rows.lengths.copy(),
                self._rows.longest.copy(),
                self._rows.token_cache.copy(),
            )
            lengths[row], longest[row] = saved.length, saved.longest
            cache.restore(row, saved.token_ids)
        except BaseException:
            self.finish(row)
            raise
        self._rows = replace(self._rows, lengths=lengths, longest=longest, token_cache=cache)
        return row

    def fork(self, row: int) -> int:
        """Continue a row in a free one as well: the new row, independent from then on; RequestError when full."""
        return self.restore(self.snapshot(row))

    def _set_row(self, row: int, *, active: bool) -> None:
        lengths, longest, cache = self._rows.lengths.copy(), self._rows.longest.copy(), self._rows.token_cache.copy()
        lengths[row] = longest[row] = 0
        cache.reset(row)
        flags = tuple(active if index == row else flag for index, flag in enumerate(self._rows.active))
        self._rows = _Rows(active=flags, lengths=lengths, longest=longest, token_cache=cache)

    def _require_active(self, row: int) -> None:
        if not 0 <= row < self.limits.max_batch or not self._rows.active[row]:
            raise RequestError(
                f"row {row}", found="a row that was not added", expected="a row from add()", remedy="Add a row first."
            )

    # --- steps --------------------------------------------------------------------------------------------

    def step(self, tokens: Mapping[int, Tokens], logits: Selection = "last") -> dict[int, Logits]:
        """Feed new tokens to some rows.

        Args:
            tokens: row -> its new tokens, 1..max_step_tokens of them.
            logits: "last" for the last token of each row, "all" for every token.

        Returns:
            row -> float32 [vocab_size], or [tokens, vocab_size] for "all"; copies.

        Raises:
            RequestError: before anything runs. On this or any other exception the session is as before.
        """
        inputs, chain = self._prepare(tokens, logits)
        chain.run(self.stage_seconds)
        return self._complete(chain, inputs, logits)

    def start(self, tokens: Mapping[int, Tokens], logits: Selection = "last") -> Callable[[], dict[int, Logits]]:
        """Begin a step, so that sessions over one engine keep several devices busy at the same time.

        Args:
            tokens, logits: as in `step`.

        Returns:
            a function to be called once, before anything else of this session: it waits for the step, commits it
            and returns its logits.

        Raises:
            RequestError: as in `step`; what goes wrong later is raised by the function.
        """
        inputs, chain = self._prepare(tokens, logits)
        wait = chain.start(self.stage_seconds)

        def complete() -> dict[int, Logits]:
            wait()
            return self._complete(chain, inputs, logits)

        return complete

    def prefill(self, row: int, tokens: Tokens, logits: Selection = "last") -> Logits:
        """Feed a prompt of any length in steps of max_step_tokens.

        Args:
            row: an added row.
            tokens: the prompt.
            logits: as in `step`.

        Raises:
            RequestError: before anything runs, if the whole prompt does not fit. An exception in a later step
                leaves the earlier ones in place.
        """
        prompt = RowInput.of(tokens)
        total, room = prompt.token_ids.shape[0], self.limits.max_context - self.length(row)
        if not 0 < total <= room:
            raise RequestError(
                f"row {row}",
                found=f"a prompt of {total} tokens",
                expected=f"1..{room} (max_context = {self.limits.max_context})",
                remedy="Give a prompt that fits, or export with a larger limit.",
            )
        parts = []
        for start in range(0, total, self.limits.max_step_tokens):
            part = prompt.slice(start, start + self.limits.max_step_tokens)
            parts.append(self.step({row: part}, logits)[row])
        return np.concatenate(parts) if logits == "all" else parts[-1]

    def _prepare(self, tokens: Mapping[int, Tokens], logits: Selection) -> tuple[dict[int, RowInput], BoundChain]:
        inputs = {row: RowInput.of(value) for row, value in tokens.items()}
        self._check(inputs)
        chain = self._bound_chain(inputs, logits)
        self._fill(chain, inputs, logits)
        return inputs, chain

    def _complete(self, chain: BoundChain, inputs: Mapping[int, RowInput], logits: Selection) -> dict[int, Logits]:
        results = self._read_logits(chain, inputs, logits)
        self.taps = self._read_taps(chain, inputs)
        self._commit(chain, inputs)
        return results

    def _check(self, inputs: Mapping[int, RowInput]) -> None:
        if not inputs:
            raise RequestError("step", found="no rows", expected="at least one", remedy="Feed a row.")
        for row, row_input in inputs.items():
            self._require_active(row)
            check_row(row, row_input, int(self._rows.lengths[row]), self.engine.config, self.limits)

    def _bound_chain(self, inputs: Mapping[int, RowInput], logits: Selection) -> BoundChain:
        """The stages bound to the shapes of this step; kept, because decoding repeats them."""
        batch = max(inputs) + 1
        tokens = max(row_input.token_ids.shape[0] for row_input in inputs.values())
        end = max(int(self._rows.lengths[row]) for row in inputs) + tokens
        visible = {f"visible_r{ratio}": self._visible_size(end, ratio) for ratio in COMPRESS_RATIOS}
        shape = {"batch": batch, "tokens": tokens, "selected": tokens if logits == "all" else 1, **visible}
        sizes = {**self._symbol_limits, **shape}
        return remembered(self._chains, tuple(shape.values()), lambda: self.chain.bind(sizes))

    def _visible_size(self, end: int, ratio: int) -> int:
        needed = max(end // ratio, 1)
        rounded = -(-needed // VISIBLE_STEP) * VISIBLE_STEP
        return min(rounded, self._symbol_limits[f"visible_r{ratio}"])

    def _fill(self, chain: BoundChain, inputs: Mapping[int, RowInput], logits: Selection) -> None:
        """Write the step's inputs. Padding is id 0 behind a row's tokens; nothing of it reaches a real token."""
        state = StepState(lengths=self._rows.lengths, token_cache=self._rows.token_cache)
        for name, view in chain.inputs.items():
            if not name.startswith(CONSTANT_INPUTS):
                view.write(step_values(name, view.shape, inputs, state, every_logit=logits == "all"))

    def _read_logits(self, chain: BoundChain, inputs: Mapping[int, RowInput], logits: Selection) -> dict[int, Logits]:
        values = chain.outputs["logits"].read()
        if logits == "last":
            return {row: values[row, 0].copy() for row in inputs}
        return {row: values[row, : row_input.token_ids.shape[0]].copy() for row, row_input in inputs.items()}

    def _read_taps(self, chain: BoundChain, inputs: Mapping[int, RowInput]) -> dict[int, Logits]:
        layers = self.engine.config.dspark_target_layer_ids
        views = [
            chain.outputs[key] for key in (f"layers.{layer}.dspark_tap" for layer in layers) if key in chain.outputs
        ]
        if not views:
            return {}
        values = np.concatenate([view.read() for view in views], axis=-1)
        return {row: values[row, : row_input.token_ids.shape[0]].copy() for row, row_input in inputs.items()}

    def _commit(self, chain: BoundChain, inputs: Mapping[int, RowInput]) -> None:
        lengths, cache = self._rows.lengths.copy(), self._rows.token_cache.copy()
        compressed = chain.outputs.get("compressed_ids")
        compressed_ids = None if compressed is None else compressed.read()
        for row, row_input in inputs.items():
            num_tokens = row_input.token_ids.shape[0]
            lengths[row] += num_tokens
            if compressed_ids is not None:
                cache.append(row, compressed_ids[row, :num_tokens])
        longest = np.maximum(self._rows.longest, lengths)
        self._rows = replace(self._rows, lengths=lengths, longest=longest, token_cache=cache)
