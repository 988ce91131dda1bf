"""The role of each backbone layer, worked out once from the config's lists (spec 1, "Layer roles")."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engram_trt.configs.model import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What one layer owns and what it reads.

    Attributes:
        layer_id: position in the backbone.
        compress_ratio: tokens per compressed entry this layer reads; 0 reads the window only.
        is_kv_source: owns a compressor, compressed KV and index keys.
        is_index_source: owns an indexer and publishes an index list.
        is_candidate_source: also publishes candidate blocks.
        uses_candidates: selects only inside the published candidate blocks.
        engram_index: row of this layer in the Engram lists, or None.
        kv_source: layer whose compressed KV is read (itself for an owner); None for a window layer.
        index_source: layer whose index list is read (itself for an index source); None for a window layer.
        is_dspark_target: its input stream is tapped for the draft stages.
    """

    layer_id: int
    compress_ratio: int
    is_kv_source: bool
    is_index_source: bool
    is_candidate_source: bool
    uses_candidates: bool
    engram_index: int | None
    kv_source: int | None
    index_source: int | None
    is_dspark_target: bool

    @property
    def has_engram(self) -> bool:
        """Whether an Engram write comes before this layer."""
        return self.engram_index is not None

    @property
    def kind(self) -> str:
        """Layers of one kind share one graph: the same roles, ratio, states and weights.

        Examples: `window`, `window_engram`, `r2_source`, `r2_reader`, `r1_source_candidates`, `r1_reindex`
        (inside candidates), `r1_reindex_all` (no candidate stage); `_engram` and `_tap` are appended.
        """
        name = self._attention_kind()
        if self.has_engram:
            name += "_engram"
        return name + "_tap" if self.is_dspark_target else name

    def _attention_kind(self) -> str:
        if self.compress_ratio == 0:
            return "window"
        ratio = f"r{self.compress_ratio}"
        if self.is_kv_source:
            if self.is_candidate_source:
                return f"{ratio}_source_candidates"
            return f"{ratio}_source_filtered" if self.uses_candidates else f"{ratio}_source"
        if self.is_index_source:
            return f"{ratio}_reindex" if self.uses_candidates else f"{ratio}_reindex_all"
        return f"{ratio}_reader"


def last_at_or_below(sources: tuple[int, ...], layer_id: int) -> int | None:
    """The last entry of an ascending list that is not above `layer_id`, or None."""
    position = bisect_right(sources, layer_id)
    return sources[position - 1] if position else None


def layer_config(config: ModelConfig, layer_id: int) -> LayerConfig:
    """The role of backbone layer `layer_id` (0 <= layer_id < n_layers)."""
    ratio = config.compress_ratios[layer_id]
    is_index_source = layer_id in config.index_source_layers
    engram = config.engram_layer_ids
    return LayerConfig(
        layer_id=layer_id,
        compress_ratio=ratio,
        is_kv_source=layer_id in config.kv_source_layers,
        is_index_source=is_index_source,
        is_candidate_source=config.has_candidates and layer_id == config.candidate_source_layer,
        uses_candidates=config.has_candidates and is_index_source and layer_id > config.candidate_source_layer,
        engram_index=engram.index(layer_id) if layer_id in engram else None,
        kv_source=last_at_or_below(config.kv_source_layers, layer_id) if ratio else None,
        index_source=last_at_or_below(config.index_source_layers, layer_id) if ratio else None,
        is_dspark_target=config.has_dspark and layer_id in config.dspark_target_layer_ids,
    )


def free_boundaries(config: ModelConfig) -> tuple[int, ...]:
    """Layer ids before which the chain may be cut without shipping a compressed cache every step.

    These are the kv sources (everything at or above one reads it or a later one) and the end, `n_layers`. A
    source inside the reach of an earlier layer's candidate blocks is no free place.
    """
    boundaries: list[int] = []
    for source in config.kv_source_layers:
        crossing = config.has_candidates and source > config.candidate_source_layer
        if source > 0 and not crossing:
            boundaries.append(source)
    return (*boundaries, config.n_layers)
