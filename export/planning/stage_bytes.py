"""Bytes of each stage, from the config alone: dense weights, experts, Engram table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from engram_trt.configs.inventory import TensorShape, global_tensors, layer_tensors
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.safetensors_header import ITEM_BYTES as STORED_BYTES
from engram_trt.configs.tensors import ITEM_BYTES, StageSpec
from engram_trt.export.passes.data_layout import data_file_bytes
from engram_trt.export.stages.interfaces import EMBEDDING, ENGRAM_HASH, HEAD, computed_names
from engram_trt.export.stages.split_block import holds

_STAGE_DTYPE_ENDINGS = (
    "embed.weight",
    "attn.wq_a.weight",
    "attn.wq_b.weight",
    "attn.wkv.weight",
    "attn.wo_a.weight",
    "attn.wo_b.weight",
    "indexer.wq_b.weight",
    "indexer.wk.weight",
    "indexer.weights_proj.weight",
    "shared_experts.w1.weight",
    "shared_experts.w2.weight",
    "shared_experts.w3.weight",
    "engram.wkv.weight",
)
"""Weights held in the stage's dtype; all others stay float32 (norms, gate, mixes, head; pooled compressors)."""

_GLOBAL_WEIGHTS = {EMBEDDING: ("embed.weight",), HEAD: ("norm.weight", "head.weight")}
_ROUTED, _TABLE = ".ffn.experts.", ".engram.embed."


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseTensor:
    """A weight of a stage's data file."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What one stage holds.

    Attributes:
        spec: its interface.
        dense: weights of its data file, by name.
        expert_bytes: routed experts as they are stored.
        table_bytes: its Engram table with scales.
        stored_bytes: all its tensors in the checkpoint.
        parameters: values, packed codes counted as two; scales do not count.
    """

    spec: StageSpec
    dense: Mapping[str, DenseTensor]
    expert_bytes: int
    table_bytes: int
    stored_bytes: int
    parameters: int

    @property
    def dense_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.dense.values())

    @property
    def data_bytes(self) -> int:
        """Size of the data file."""
        return data_file_bytes(tensor.num_bytes for tensor in self.dense.values())


def stored_bytes(tensor: TensorShape) -> int:
    """Bytes of a tensor in a checkpoint."""
    return math.prod(tensor.shape) * STORED_BYTES[tensor.dtype]


def num_parameters(name: str, tensor: TensorShape) -> int:
    """Values of a tensor: packed FP4 codes count twice, scales not at all."""
    if name.endswith(".scale"):
        return 0
    return math.prod(tensor.shape) * (2 if tensor.dtype == "I8" else 1)


def stage_bytes(spec: StageSpec, config: ModelConfig, dtype: str, tensors: Mapping[str, TensorShape]) -> StageBytes:
    """Bytes of one stage.

    Args:
        spec: its interface.
        config: the model.
        dtype: of the stages.
        tensors: of the checkpoint, those the stage is made from.
    """
    dense: dict[str, TensorShape] = {}
    experts = table = stored = parameters = 0
    for name, tensor in tensors.items():
        num_bytes = stored_bytes(tensor)
        stored += num_bytes
        parameters += num_parameters(name, tensor)
        if _ROUTED in name:
            experts += num_bytes
        elif _TABLE in name:
            table += num_bytes
        else:
            dense[name] = tensor
    return StageBytes(
        spec=spec,
        dense=dict(_dense(spec, config, dtype, dense)),
        expert_bytes=experts,
        table_bytes=table,
        stored_bytes=stored,
        parameters=parameters,
    )


def _dense(
    spec: StageSpec, config: ModelConfig, dtype: str, tensors: Mapping[str, TensorShape]
) -> Iterator[tuple[str, DenseTensor]]:
    pooled = spec.layer_id is not None and config.layer(spec.layer_id).compress_ratio > 1
    prefix = "" if spec.layer_id is None else f"layers.{spec.layer_id}."
    for name, tensor in tensors.items():
        if name.endswith(".scale"):
            continue
        in_stage_dtype = name.endswith(_STAGE_DTYPE_ENDINGS) or (name.endswith("compressor.wkv.weight") and not pooled)
        yield name.removeprefix(prefix), DenseTensor(shape=tensor.shape, dtype=dtype if in_stage_dtype else "float32")
    yield from _computed(spec, config)


def _computed(spec: StageSpec, config: ModelConfig) -> Iterator[tuple[str, DenseTensor]]:
    """Weights that follow from config and tokenizer."""
    layers, sizes = len(config.engram_layer_ids), config.engram_max_ngram_size
    heads = config.engram_n_heads
    hash_shapes = {
        "token_map": (config.vocab_size,),
        "multipliers": (layers, sizes),
        "primes": (layers, sizes - 1, heads),
        "offsets": (layers, (sizes - 1) * heads),
    }
    for name in computed_names(spec, config):
        if spec.name == ENGRAM_HASH:
            yield name, DenseTensor(shape=hash_shapes[name], dtype="int64")
        else:
            yield name, DenseTensor(shape=(config.rope_head_dim // 2,), dtype="float32")


def chain_bytes(specs: tuple[StageSpec, ...], config: ModelConfig, dtype: str) -> tuple[StageBytes, ...]:
    """`stage_bytes` of every stage, in order.

    Layers of a kind hold the same, but for a table, whose rows follow from the layer's own primes; so that one of
    each kind is looked at.
    """
    others = global_tensors(config, whole=False)
    known: dict[tuple[str, int | None], StageBytes] = {}
    found = []
    for spec in specs:
        key = spec.kind, spec.layer_id if spec.layer_id in config.engram_layer_ids else None
        if key not in known:
            if spec.layer_id is None:
                own = {name: others[name] for name in _GLOBAL_WEIGHTS.get(spec.name, ())}
            else:
                tensors = layer_tensors(config, spec.layer_id)
                own = {name: tensor for name, tensor in tensors.items() if holds(spec, name)}
            known[key] = stage_bytes(spec, config, dtype, own)
        found.append(replace(known[key], spec=spec))
    return tuple(found)
