"""A small byte-level BPE tokenizer with any vocabulary size, trained on a text that ships with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engram_trt.configs.errors import ConfigError
from engram_trt.configs.model import ModelConfig

_BYTE_TOKENS = 256
_BOS, _EOS, _PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
_IMAGE, _NOISE = "<｜image｜>", "<｜draft▁noise｜>"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """`tokenizer.json` and `tokenizer_config.json` as they go to disk."""

    tokenizer: bytes
    tokenizer_config: bytes


def special_tokens(config: ModelConfig) -> dict[int, str]:
    """Name of every special id of a model; where two roles share an id the first one names it."""
    roles = [(config.bos_token_id, _BOS), (config.eos_token_id, _EOS), (config.pad_token_id, _PAD)]
    if config.has_vision:
        roles.append((config.image_token_id, _IMAGE))
    if config.has_dspark:
        roles.append((config.dspark_noise_token_id, _NOISE))
    names: dict[int, str] = {}
    for token_id, name in roles:
        if 0 <= token_id < config.vocab_size:
            names.setdefault(token_id, name)
    return names


def train_tokenizer(config: ModelConfig) -> TokenizerFiles:
    """Train a tokenizer with exactly `vocab_size` ids; the same config gives the same bytes.

    Ids that the text has no use for are filled with names that no text contains.

    Raises:
        ConfigError: for a vocabulary too small for the 256 bytes and the special tokens.
    """
    specials = special_tokens(config)
    room = config.vocab_size - len(specials)
    if room < _BYTE_TOKENS:
        raise ConfigError(
            "vocab_size",
            found=str(config.vocab_size),
            expected=f"at least {_BYTE_TOKENS + len(specials)}: all bytes and the special tokens",
            remedy="Give a tokenizer with --tokenizer, or a larger vocabulary.",
        )
    document = json.loads(_trained(room).to_str())
    _place(document, specials, config.vocab_size)
    return TokenizerFiles(
        tokenizer=json.dumps(document, ensure_ascii=False, indent=1).encode(),
        tokenizer_config=json.dumps(_tokenizer_config(config, specials), ensure_ascii=False, indent=1).encode(),
    )


def _trained(vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    text = files("engram_trt.export").joinpath("data", "tiny_corpus.txt").read_text(encoding="utf-8")
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def _place(document: dict[str, Any], specials: dict[int, str], vocab_size: int) -> None:
    """Renumber the vocabulary around the special ids and fill it up."""
    vocabulary = document["model"]["vocab"]
    learned = iter(sorted(vocabulary, key=vocabulary.__getitem__))
    placed: dict[str, int] = {}
    for token_id in range(vocab_size):
        name = specials.get(token_id) or next(learned, f"<unused_{token_id}>")
        placed[name] = token_id
    document["model"]["vocab"] = placed
    document["added_tokens"] = [
        {
            "id": token_id,
            "content": name,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for token_id, name in sorted(specials.items())
    ]


def _tokenizer_config(config: ModelConfig, specials: dict[int, str]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": specials.get(config.bos_token_id),
        "eos_token": specials.get(config.eos_token_id),
        "pad_token": specials.get(config.pad_token_id),
        "clean_up_tokenization_spaces": False,
    }
