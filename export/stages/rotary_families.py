"""Which rotary tables the layers of a model use."""

from __future__ import annotations

from engram_trt.configs.model import ModelConfig


def rotary_families(config: ModelConfig) -> dict[str, int]:
    """Rotary table families the model's layers use: name -> a compress ratio that selects it."""
    families = {}
    if 0 in config.compress_ratios[: config.n_layers]:
        families["window"] = 0
    compressed = [ratio for ratio in config.compress_ratios[: config.n_layers] if ratio]
    if compressed:
        families["compress"] = compressed[0]
    return families
