"""The tensors of the released checkpoint: the published counts and byte sums, and the layers' parameter counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import pytest

from engram_trt.configs.errors import ConfigError
from engram_trt.configs.inventory import TensorShape, checkpoint_tensors
from engram_trt.configs.model import ModelConfig
from engram_trt.configs.preset_files import model_preset

ITEM_BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1}


@pytest.fixture(scope="module")
def released() -> dict[str, TensorShape]:
    return checkpoint_tensors(model_preset("released"))


def num_bytes(tensors: Mapping[str, TensorShape], prefix: str = "", without: str = "\0") -> int:
    return sum(
        math.prod(shape.shape) * ITEM_BYTES[shape.dtype]
        for name, shape in tensors.items()
        if name.startswith(prefix) and without not in name
    )


def num_parameters(tensors: Mapping[str, TensorShape], prefix: str, without: str = "\0") -> int:
    """Scales left out, a packed byte counted as two."""
    return sum(
        math.prod(shape.shape) * (2 if shape.dtype == "I8" else 1)
        for name, shape in tensors.items()
        if name.startswith(prefix) and without not in name and not name.endswith(".scale")
    )


def test_published_counts_and_sizes(released: dict[str, TensorShape]) -> None:
    assert len(released) == 96_085
    assert num_bytes(released) == 510_286_023_000
    counts = Counter(shape.dtype for shape in released.values())
    assert counts == {"BF16": 520, "F32": 387, "F8_E4M3": 357, "F8_E8M0": 47_589, "I8": 47_232}
    sizes = {
        dtype: num_bytes({name: shape for name, shape in released.items() if shape.dtype == dtype}) for dtype in counts
    }
    assert sizes == {
        "BF16": 3_952_883_712,
        "F32": 169_229_128,
        "F8_E4M3": 204_015_223_296,
        "F8_E8M0": 23_563_015_184,
        "I8": 278_585_671_680,
    }


@pytest.mark.parametrize(
    ("prefix", "parameters", "size"),
    [
        ("layers.2.", 13_765_227_766, 7_405_694_680),
        ("layers.20.", 13_762_606_326, 7_400_451_800),
        ("layers.24.", 13_759_918_710, 7_395_076_568),
        ("layers.39.", 13_754_511_990, 7_389_500_888),
        ("mtp.0.", 4_772_152_438, 2_652_643_800),
        ("mtp.1.", 4_693_504_118, 2_573_913_560),
        ("mtp.2.", 4_759_705_974, 2_706_317_272),
    ],
)
def test_blocks(released: dict[str, TensorShape], prefix: str, parameters: int, size: int) -> None:
    assert num_parameters(released, prefix) == parameters
    assert num_bytes(released, prefix) == size


def test_parts(released: dict[str, TensorShape]) -> None:
    assert num_parameters(released, "layers.2.attn.") == 137_333_184
    assert num_parameters(released, "layers.3.attn.") == 126_617_408
    # The published 13,626,901,248 of a layer's experts leave out the second bias, which only vision adds.
    assert num_parameters(released, "layers.3.ffn.", without="bias_vl") == 13_626_901_248 - 384
    assert num_parameters(released, "layers.1.engram.") == 98_462_906_368
    assert num_parameters(released, "layers.14.engram.") == 98_465_597_952
    assert num_bytes(released, "layers.14.engram.embed") == 101_380_404_048
    assert num_parameters(released, "vision.") == 411_842_560
    assert num_parameters(released, "aligner.") == 73_410_560
    assert num_parameters(released, "") == 763_205_315_794


def test_rows_of_the_published_table(released: dict[str, TensorShape]) -> None:
    expected = {
        "layers.0.hc_attn_fn": ("F32", (24, 20480)),
        "layers.0.attn.attn_sink": ("F32", (64,)),
        "layers.0.attn.wq_b.weight": ("F8_E4M3", (32768, 1280)),
        "layers.0.attn.wq_b.scale": ("F8_E8M0", (1024, 40)),
        "layers.0.attn.wo_a.weight": ("F8_E4M3", (8192, 4096)),
        "layers.2.attn.compressor.wgate.weight": ("BF16", (512, 5120)),
        "layers.36.attn.indexer.wq_b.weight": ("F8_E4M3", (4096, 1280)),
        "layers.7.ffn.experts.383.w2.weight": ("I8", (5120, 1152)),
        "layers.7.ffn.experts.383.w2.scale": ("F8_E8M0", (5120, 72)),
        "layers.14.engram.embed.scale": ("F8_E8M0", (384_016_682, 8)),
        "layers.1.engram.wkv.weight": ("F8_E4M3", (25600, 6144)),
        "mtp.0.main_proj.weight": ("F8_E4M3", (5120, 15360)),
        "mtp.2.confidence_head.proj.weight": ("BF16", (1, 5376)),
        "vision.patch_embed.proj.weight": ("BF16", (1024, 588)),
        "aligner.w1.weight": ("BF16", (5120, 9216)),
    }
    assert {name: (released[name].dtype, released[name].shape) for name in expected} == expected


def test_roles_decide_what_a_layer_holds(released: dict[str, TensorShape]) -> None:
    def holders(ending: str) -> list[int]:
        return [
            int(name.split(".")[1]) for name in released if name.startswith("layers.") and name.endswith(f".{ending}")
        ]

    assert holders("attn.compressor.wkv.weight") == [2, 8, 14, 20]
    assert holders("attn.compressor.wgate.weight") == [2, 8, 14]
    assert holders("attn.indexer.wk.weight") == [2, 8, 14, 20]
    assert holders("attn.indexer.weights_proj.weight") == [2, 8, 14, 20, 24, 28, 32, 36]
    assert holders("engram.q_weight") == [1, 14]
    assert "mtp.1.main_proj.weight" not in released
    assert "mtp.1.norm.weight" not in released


def test_without_vision_and_drafts_their_tensors_are_gone() -> None:
    flat = model_preset("released").to_flat_dict() | {"vision_n_layers": 0, "dspark_block_size": 0}
    names = checkpoint_tensors(ModelConfig.from_dict(flat)).keys()
    assert not [name for name in names if name.startswith(("mtp.", "vision.", "aligner.", "image_"))]
    assert not [name for name in names if name.endswith("bias_vl")]


def test_a_partial_checkpoint_holds_the_global_text_tensors_and_its_layers() -> None:
    config = model_preset("tiny")
    names = checkpoint_tensors(config, [4, 1]).keys()
    assert {name.split(".")[1] for name in names if name.startswith("layers.")} == {"1", "4"}
    others = {name for name in names if not name.startswith("layers.")}
    assert others == {
        "embed.weight",
        "norm.weight",
        "head.weight",
        "image_start",
        "image_end",
        "image_newline",
    }
    assert names <= checkpoint_tensors(config).keys()
    with pytest.raises(ConfigError, match="12"):
        checkpoint_tensors(config, [12])


def test_float_weights_are_refused() -> None:
    flat = model_preset("tiny").to_flat_dict()
    for change in ({"dtype": "bf16"}, {"expert_dtype": None}):
        with pytest.raises(ConfigError, match="released layout"):
            checkpoint_tensors(ModelConfig.from_dict(flat | change))
    with pytest.raises(ConfigError, match="moe_inter_dim"):
        checkpoint_tensors(ModelConfig.from_dict(flat | {"moe_inter_dim": 40}))
