"""Least times, from the bytes a step must read and the operations it must do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from engram_trt.configs.inventory import SCALE_BLOCK
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.tensors import ITEM_BYTES
from engram_trt.export.planning.ceilings import Ceilings
from engram_trt.export.planning.stage_bytes import StageBytes
from engram_trt.export.stages.interfaces import EMBEDDING, HEAD
from engram_trt.export.stages.split_block import has_attention

MICROSECONDS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """One step: sequences, tokens of each, and how many tokens each has when it ends."""

    batch: int
    tokens: int
    context: int

    @property
    def rows(self) -> int:
        return self.batch * self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What a step of one stage or more reads and computes."""

    read_bytes: int
    operations: int

    def __add__(self, other: StepWork) -> StepWork:
        return StepWork(read_bytes=self.read_bytes + other.read_bytes, operations=self.operations + other.operations)

    def floor_us(self, ceilings: Ceilings) -> int:
        """Microseconds, if reading and computing overlap entirely."""
        by_memory = self.read_bytes * MICROSECONDS // ceilings.memory
        return max(by_memory, self.operations * MICROSECONDS // ceilings.operations)


def total(work: Iterable[StepWork]) -> StepWork:
    """The sum."""
    return sum(work, StepWork(read_bytes=0, operations=0))


def distinct_experts(config: ModelConfig, rows: int) -> float:
    """Experts that some row of a step chooses, if every row chooses evenly; exact for one row."""
    experts, chosen = config.n_routed_experts, config.n_activated_experts
    return experts * (1 - (1 - chosen / experts) ** rows)


def stage_work(stage: StageBytes, config: ModelConfig, dtype: str, step: StepShape) -> StepWork:
    """Bytes and operations of one stage in one step.

    Args:
        stage: the stage.
        config, dtype: the model, and the stages' dtype.
        step: its shape.
    """
    if stage.spec.name == EMBEDDING:
        return StepWork(read_bytes=step.rows * config.dim * ITEM_BYTES[dtype], operations=0)
    rows = step.batch if stage.spec.name == HEAD else step.rows
    matrices = sum(math.prod(t.shape) for t in stage.dense.values() if len(t.shape) > 1 and t.dtype != "int64")
    work = StepWork(read_bytes=stage.dense_bytes, operations=2 * rows * matrices)
    if stage.spec.layer_id is None:
        return work
    if stage.expert_bytes:
        work += _expert_work(stage, config, rows)
    return work + _attention_work(stage, config, dtype, step) if has_attention(stage.spec) else work


def _expert_work(stage: StageBytes, config: ModelConfig, rows: int) -> StepWork:
    share = distinct_experts(config, rows) / config.n_routed_experts
    operations = 2 * rows * config.n_activated_experts * 3 * config.dim * config.moe_inter_dim
    return StepWork(read_bytes=round(stage.expert_bytes * share), operations=operations)


def _attention_work(stage: StageBytes, config: ModelConfig, dtype: str, step: StepShape) -> StepWork:
    layer, item = config.layer(stage.spec.layer_id or 0), ITEM_BYTES[dtype]
    entries = step.context // layer.compress_ratio if layer.compress_ratio else 0
    attended = min(config.window_size, step.context) + min(config.index_topk, entries)
    reads = step.rows * attended * config.head_dim * item
    operations = 4 * step.rows * attended * config.n_heads * config.head_dim
    if stage.table_bytes:
        table_row = config.engram_head_dim + config.engram_head_dim // SCALE_BLOCK
        reads += step.rows * config.engram_columns * table_row
    if layer.is_index_source:
        # Keys are read once for all tokens of a sequence; every token is held against all it can see.
        reads += step.batch * entries * config.index_head_dim * item
        operations += 2 * step.rows * entries * config.index_n_heads * config.index_head_dim
    return StepWork(read_bytes=reads, operations=operations)
