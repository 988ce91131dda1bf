"""Text to token ids and back, by the checkpoint's `tokenizer.json`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from engram_trt.configs.errors import RequestError, TokenizerError
from engram_trt.configs.json_file import parse_json_object, read_bytes
from engram_trt.configs.model import ModelConfig

TOKENIZER_NAME = "tokenizer.json"
_MAX_FILE_BYTES = 128 << 20
_REPLACEMENT = "\ufffd"


def _load(document: dict[str, Any], where: str) -> tokenizers.Tokenizer:
    """Build the back end; its errors have no type of their own, and damaged files can make it panic."""
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(document))
    except BaseException as cause:
        if isinstance(cause, KeyboardInterrupt | SystemExit | MemoryError):
            raise
        raise TokenizerError(
            where,
            found=f"a file that the tokenizers library refuses ({str(cause)[:200]})",
            expected="a tokenizer.json",
            remedy="Fetch the tokenizer of the checkpoint again.",
        ) from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenizer:
    """A tokenizer; it is not changed by use.

    Attributes:
        path: the file it was read from.
        vocab_size: number of ids; they are 0..vocab_size-1.
        bos_token_id: what `encode` puts in front.
        parsing: the back end that knows the added tokens (special and other names such as `<think>`).
        plain: the back end that does not, so that such a name in a text is text.
    """

    path: Path
    vocab_size: int
    bos_token_id: int
    parsing: tokenizers.Tokenizer
    plain: tokenizers.Tokenizer

    @classmethod
    def open(cls, path: Path | str, config: ModelConfig | None = None) -> Tokenizer:
        """Read a `tokenizer.json`, or the one in a folder. No other file of the folder is used or run.

        Args:
            path: file or folder.
            config: the model it must fit; it also says which id is BOS (0 without it).

        Raises:
            TokenizerError: for a missing or damaged file, ids with holes, or another vocabulary size.
        """
        file = Path(path)
        if file.is_dir():
            file = file / TOKENIZER_NAME
        text = read_bytes(file, TokenizerError, max_bytes=_MAX_FILE_BYTES)
        document = parse_json_object(text, str(file), TokenizerError)
        # Whatever the file says, a prompt is neither cut nor padded.
        document |= {"truncation": None, "padding": None}
        parsing = _load(document, str(file))
        plain = _load(document | {"added_tokens": []}, str(file))
        vocab_size = _dense_size(parsing, str(file))
        if config is not None and vocab_size != config.vocab_size:
            raise TokenizerError(
                str(file),
                found=f"{vocab_size} ids",
                expected=f"{config.vocab_size}, the model's vocab_size",
                remedy="Use the tokenizer of this checkpoint.",
            )
        return cls(
            path=file,
            vocab_size=vocab_size,
            bos_token_id=0 if config is None else config.bos_token_id,
            parsing=parsing,
            plain=plain,
        )

    def encode(self, text: str, *, bos: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a raw text; no chat template is applied.

        Args:
            text: the prompt.
            bos: put the BOS id in front.
            parse_special: read the names of added tokens in the text as those tokens, not as text.

        Raises:
            RequestError: for a text with halves of surrogate pairs, which has no UTF-8 form.
        """
        backend = self.parsing if parse_special else self.plain
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as cause:
            raise RequestError(
                "prompt",
                found=f"a lone surrogate at character {cause.start}",
                expected="Unicode text",
                remedy="Give the prompt as UTF-8.",
            ) from None
        ids = backend.encode(text, add_special_tokens=False).ids
        return [self.bos_token_id, *ids] if bos else list(ids)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave out special tokens (EOS among them).

        Raises:
            RequestError: for an id outside the vocabulary.
        """
        checked = [self._checked(token_id) for token_id in ids]
        return str(self.parsing.decode(checked, skip_special_tokens=skip_special))

    def token_texts(self) -> list[str]:
        """Each id decoded on its own, special tokens included, by ascending id."""
        batch = [[token_id] for token_id in range(self.vocab_size)]
        return list(self.parsing.decode_batch(batch, skip_special_tokens=False))

    def token_name(self, token_id: int) -> str:
        """The vocabulary string of an id."""
        return str(self.parsing.id_to_token(self._checked(token_id)))

    def stream(self, *, skip_special: bool = False) -> TextStream:
        """A new text stream for one answer."""
        return TextStream(lambda ids: self.decode(ids, skip_special=skip_special))

    def _checked(self, token_id: int) -> int:
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(
                "token id",
                found=str(token_id),
                expected=f"0..{self.vocab_size - 1}",
                remedy="Give ids of this model's vocabulary.",
            )
        return int(token_id)


def _dense_size(backend: tokenizers.Tokenizer, where: str) -> int:
    ids = backend.get_vocab(with_added_tokens=True).values()
    size = len(set(ids))
    if size == 0 or max(ids) != size - 1:
        raise TokenizerError(
            where,
            found=f"{size} ids up to {max(ids, default=-1)}",
            expected="ids without holes, from 0",
            remedy="Use the tokenizer of this checkpoint.",
        )
    return size


class TextStream:
    """Turns ids that arrive one by one into text that can be printed at once.

    A token may end inside a character; what it adds is held back until the character is complete. The pieces
    joined are the text of all ids together.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._pending: list[int] = []
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """Take one id; returns the text that it completes, often empty or several characters."""
        self._pending.append(token_id)
        text = self._decode(self._pending)
        # A trailing U+FFFD may be the beginning of a character; one before the last cannot.
        whole = text.removesuffix(_REPLACEMENT)
        piece = whole[self._emitted :]
        self._emitted = max(self._emitted, len(whole))
        if len(whole) == len(text):
            self._pending.clear()
            self._emitted = 0
        return piece

    def finish(self) -> str:
        """The text of bytes that never became a character (U+FFFD), or nothing; the stream starts afresh."""
        piece = self._decode(self._pending)[self._emitted :]
        self._pending.clear()
        self._emitted = 0
        return piece
