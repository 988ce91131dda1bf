"""The compressed token map: ids whose texts normalise to the same string share one hash id (spec 2.1)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, normalizers

from engram_trt.configs.errors import TokenizerError
from engram_trt.configs.model import ModelConfig
from engram_trt.runtime.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
# A private-use character that stands in for a single space while the ends are stripped.
_KEPT_SPACE = "\ue000"


def _normalizer() -> normalizers.Normalizer:
    # The library's own steps: their Unicode tables and their idea of white space decide which ids are shared.
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _KEPT_SPACE),
            normalizers.Strip(),
            normalizers.Replace(_KEPT_SPACE, " "),
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenMap:
    """Raw token id -> compressed id.

    Attributes:
        ids: int64 [vocab_size], read-only, values 0..num_classes-1 in order of first appearance.
        num_classes: distinct values.
        digest: SHA-256 (hex) of `ids` as little-endian int32.
    """

    ids: npt.NDArray[np.int64]
    num_classes: int
    digest: str

    @classmethod
    def build(cls, tokenizer: Tokenizer) -> TokenMap:
        """Build the map of a tokenizer.

        Tokens whose bytes are no UTF-8 text are keyed by their vocabulary string, the others by their
        normalised text, or the text itself where nothing is left of it; both kinds of key share one dictionary.
        """
        normalizer = _normalizer()
        classes: dict[str, int] = {}
        ids = np.empty(tokenizer.vocab_size, dtype=np.int64)
        for token_id, text in enumerate(tokenizer.token_texts()):
            is_whole = _REPLACEMENT not in text
            key = normalizer.normalize_str(text) or text if is_whole else tokenizer.token_name(token_id)
            ids[token_id] = classes.setdefault(key, len(classes))
        ids.setflags(write=False)
        digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
        return cls(ids=ids, num_classes=len(classes), digest=digest)

    @classmethod
    def for_model(cls, tokenizer: Tokenizer, config: ModelConfig) -> TokenMap:
        """Build the map and hold it against the model.

        Raises:
            TokenizerError: when the number of classes is not the model's: it is another tokenizer, and every
                Engram row would be a wrong one.
        """
        token_map = cls.build(tokenizer)
        expected = config.engram_compressed_vocab_size
        if config.has_engram and token_map.num_classes != expected:
            raise TokenizerError(
                str(tokenizer.path),
                found=f"{token_map.num_classes} distinct normalised tokens",
                expected=f"{expected}, the model's engram_compressed_vocab_size",
                remedy="Use the tokenizer of this checkpoint.",
            )
        return token_map
