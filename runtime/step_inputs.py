"""What a caller hands a session for one row and one step, and its check against the model and the limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engram_trt.configs.errors import RequestError
from engram_trt.configs.limits import Limits
from engram_trt.configs.model import ModelConfig
from engram_trt.runtime.token_cache import TokenCache

TEXT, IMAGE_START, IMAGE, IMAGE_NEW_LINE, IMAGE_END = -1, 0, 1, 2, 3
"""Token types of the published image processor (spec 9)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowInput:
    """New tokens of one row.

    Args:
        token_ids: [n] raw ids; image positions carry the model's image token id.
        image_mask: [n] bool, True inside an image span, its start, newline and end included; None for text only.
        image_embeddings: [n, dim] float32 rows for the image positions (other rows are ignored); None for text.
    """

    token_ids: npt.NDArray[np.int64]
    image_mask: npt.NDArray[np.bool_] | None = None
    image_embeddings: npt.NDArray[np.float32] | None = None

    @classmethod
    def of(cls, value: RowInput | Sequence[int] | npt.NDArray[Any]) -> RowInput:
        """Plain ids become a text-only input; RequestError for what cannot be ids."""
        if isinstance(value, RowInput):
            return value
        ids = np.asarray(value)
        if ids.size == 0:
            ids = ids.astype(np.int64)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise RequestError(
                "token ids",
                found=f"an array of {ids.dtype} with {ids.ndim} dimensions",
                expected="a flat sequence of integers",
                remedy="Pass token ids as the tokenizer returns them.",
            )
        return cls(token_ids=ids.astype(np.int64))

    def slice(self, start: int, stop: int) -> RowInput:
        """Tokens start..stop-1: how a prompt is cut into steps, anywhere, also inside an image."""
        mask, rows = self.image_mask, self.image_embeddings
        return RowInput(
            token_ids=self.token_ids[start:stop],
            image_mask=None if mask is None else mask[start:stop],
            image_embeddings=None if rows is None else rows[start:stop],
        )


def image_rows(
    token_types: npt.NDArray[np.int64],
    features: Sequence[npt.NDArray[np.float32]],
    image_start: npt.NDArray[np.float32],
    image_newline: npt.NDArray[np.float32],
    image_end: npt.NDArray[np.float32],
) -> npt.NDArray[np.float32]:
    """Embedding rows of a row's image spans (spec 9).

    Args:
        token_types: [n], TEXT or one of the image types.
        features: per image, [image tokens, dim] aligner rows in row-major order.
        image_start, image_newline, image_end: [dim] learned vectors.

    Returns:
        [n, dim]; zeros at text positions.

    Raises:
        RequestError: the types hold another number of image tokens than the features.
    """
    rows = np.zeros((token_types.shape[0], image_start.shape[0]), dtype=np.float32)
    for kind, vector in ((IMAGE_START, image_start), (IMAGE_NEW_LINE, image_newline), (IMAGE_END, image_end)):
        rows[token_types == kind] = vector
    places = np.flatnonzero(token_types == IMAGE)
    stacked = np.concatenate([rows[:0], *features])
    if stacked.shape[0] != places.shape[0]:
        raise RequestError(
            "image features",
            found=f"{stacked.shape[0]} rows",
            expected=f"{places.shape[0]}, one per image token",
            remedy="Pass the aligner's rows of every image in order.",
        )
    rows[places] = stacked
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """What the rows of a session have been fed.

    Args:
        lengths: [max_batch] int64.
        token_cache: their last compressed ids.
    """

    lengths: npt.NDArray[np.int64]
    token_cache: TokenCache


def step_values(
    name: str, shape: tuple[int, ...], inputs: Mapping[int, RowInput], state: StepState, *, every_logit: bool
) -> npt.NDArray[Any]:
    """Values of one step tensor. Padding is id 0 behind a row's tokens; nothing of it reaches a real token.

    Args:
        name, shape: of the tensor in this step.
        inputs: row -> its new tokens.
        state: of all rows, before the step.
        every_logit: logits of all tokens are wanted, not only those of a row's last one.
    """
    if name == "start_positions":
        return state.lengths[: shape[0]]
    if name == "token_history":
        return state.token_cache.recent(shape[0])
    if name == "logit_positions" and every_logit:
        return np.broadcast_to(np.arange(shape[1], dtype=np.int64), shape)
    dtypes = {"image_mask": np.bool_, "image_embeddings": np.float32}
    values: npt.NDArray[Any] = np.zeros(shape, dtype=dtypes.get(name, np.int64))
    for row, row_input in inputs.items():
        num_tokens = row_input.token_ids.shape[0]
        if name == "token_ids":
            values[row, :num_tokens] = row_input.token_ids
        elif name == "logit_positions":
            values[row] = num_tokens - 1
        elif name == "image_mask" and row_input.image_mask is not None:
            values[row, :num_tokens] = row_input.image_mask
        elif name == "image_embeddings" and row_input.image_embeddings is not None:
            values[row, :num_tokens] = row_input.image_embeddings
    return values


def check_row(row: int, inputs: RowInput, length: int, config: ModelConfig, limits: Limits) -> None:
    """Hold one row's input against the model and the limits, before anything runs.

    Args:
        row: for messages.
        inputs: the new tokens.
        length: tokens the row has already.
        config, limits: the model and the deployment's limits.

    Raises:
        RequestError: naming the bound and the value.
    """
    ids, num_tokens = inputs.token_ids, inputs.token_ids.shape[0]
    where = f"row {row}"
    if num_tokens == 0:
        raise RequestError(where, found="no tokens", expected="at least one", remedy="Leave the row out of the step.")
    if num_tokens > limits.max_step_tokens:
        raise RequestError(
            where,
            found=f"{num_tokens} tokens in one step",
            expected=f"at most max_step_tokens = {limits.max_step_tokens}",
            remedy="Feed the prompt in several steps, as Session.prefill does.",
        )
    if length + num_tokens > limits.max_context:
        raise RequestError(
            where,
            found=f"{length} tokens and {num_tokens} new ones",
            expected=f"at most max_context = {limits.max_context}",
            remedy="Shorten the prompt, or export with a larger limit.",
        )
    outside = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if outside.size:
        raise RequestError(
            f"{where}, token {int(outside[0])} of the step",
            found=f"id {int(ids[outside[0]])}",
            expected=f"0..{config.vocab_size - 1}",
            remedy="Encode the text with the model's own tokenizer.",
        )
    _check_image(where, inputs, config)


def _check_image(where: str, inputs: RowInput, config: ModelConfig) -> None:
    mask, rows, num_tokens = inputs.image_mask, inputs.image_embeddings, inputs.token_ids.shape[0]
    if mask is None and rows is None:
        return
    if not config.has_vision and rows is not None:
        raise RequestError(
            where,
            found="image embeddings",
            expected="text only: vision_n_layers is 0",
            remedy="Use a model with vision.",
        )
    if mask is None or mask.shape != (num_tokens,) or mask.dtype != np.bool_:
        raise RequestError(
            where,
            found="an image mask of another shape or type",
            expected=f"bool [{num_tokens}]",
            remedy="Pass one mask entry per token.",
        )
    if rows is not None and rows.shape != (num_tokens, config.dim):
        raise RequestError(
            where,
            found=f"image embeddings of shape {list(rows.shape)}",
            expected=f"[{num_tokens}, {config.dim}]",
            remedy="Pass one embedding row per token; rows at text positions are ignored.",
        )
    if rows is None and config.has_vision and mask.any():
        raise RequestError(
            where,
            found="image positions without embeddings",
            expected="a row for each",
            remedy="Pass image_embeddings with the mask.",
        )
