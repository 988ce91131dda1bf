"""One layer: Engram write, attention and experts around the residual streams (spec 4, "Block n")."""

from __future__ import annotations

from torch import Tensor, nn

from engram_trt.configs.layers import LayerConfig
from engram_trt.configs.model import ModelConfig
from engram_trt.export.modeling.attention import Attention
from engram_trt.export.modeling.compute import ComputeConfig
from engram_trt.export.modeling.engram import Engram
from engram_trt.export.modeling.hyper_connections import collapse, expand
from engram_trt.export.modeling.layers import RMSNorm, parameter
from engram_trt.export.modeling.moe import MoE
from engram_trt.export.modeling.probe import probe
from engram_trt.plugins.hyper_connection_mix.torch_op import hyper_connection_mix


class AttentionHalf(nn.Module):
    """A layer up to the input of its experts; parameter names are the checkpoint's, less `layers.N.`."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, compute: ComputeConfig) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        if layer.has_engram:
            self.engram = Engram(config, compute)
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config, layer, compute)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        streams = config.hc_mult * config.dim
        for sublayer in ("attn", "ffn"):
            self.register_parameter(f"hc_{sublayer}_fn", parameter(config.hc_mixes, streams))
            self.register_parameter(f"hc_{sublayer}_base", parameter(config.hc_mixes))
            self.register_parameter(f"hc_{sublayer}_scale", parameter(3))

    def attend(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Engram write and attention.

        Args:
            inputs: the stage's tensors by name (see `stages/block.py`); updated with every cache and list the
                layer produces, under the name of what it replaces.

        Returns:
            streams after attention, ffn_in [batch, tokens, dim], and the mix around the experts: pre, post, comb.
        """
        streams, pre_mix = inputs["hidden_states"], inputs["pre_mix"]
        family = "compress" if self.layer.compress_ratio else "window"
        table = inputs[f"{family}_rotary_cos"], inputs[f"{family}_rotary_sin"]
        if self.layer.has_engram:
            table_rows = inputs["engram_rows"], inputs["engram_scales"]
            streams = self.engram(streams, inputs["engram_ids"], *table_rows, inputs.get("image_mask"))
        if self.layer.is_dspark_target:
            inputs["dspark_tap"] = streams.float().mean(dim=2).to(streams.dtype)

        attn_mix = self.mix("attn", streams)
        attn_in = self.attn_norm(collapse(streams, pre_mix))
        attn_out = self.attn(attn_in, table, inputs)
        streams = expand(attn_out, streams, attn_mix[1], attn_mix[2])

        ffn_mix = self.mix("ffn", streams)
        ffn_in = self.ffn_norm(collapse(streams, attn_mix[0]))
        for name, value in (("attn_in", attn_in), ("attn_out", attn_out), ("ffn_in", ffn_in)):
            probe(name, value)
        return streams, ffn_in, ffn_mix

    def mix(self, sublayer: str, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre, post and comb of one sublayer ("attn" or "ffn"), from the streams before it."""
        mixed: tuple[Tensor, Tensor, Tensor] = hyper_connection_mix(
            streams,
            getattr(self, f"hc_{sublayer}_fn"),
            getattr(self, f"hc_{sublayer}_scale"),
            getattr(self, f"hc_{sublayer}_base"),
            self.config.hc_sinkhorn_iters,
            self.config.hc_eps,
            self.config.norm_eps,
        )
        for name, value in zip(("pre", "post", "comb"), mixed, strict=True):
            probe(f"hc_{sublayer}_{name}", value)
        return mixed


class Block(AttentionHalf):
    """A whole layer: a pure function of the stage's inputs."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, compute: ComputeConfig) -> None:
        super().__init__(config, layer, compute)
        self.ffn = MoE(config, compute)

    def forward(self, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> tuple[Tensor, ...]:
        """Run the layer.

        Args:
            inputs: as for `attend`.
            outputs: bindings to return; `X_out` is the new `X`.

        Returns:
            the tensors named by `outputs`.
        """
        streams, ffn_in, ffn_mix = self.attend(inputs)
        ffn_out = self.ffn(ffn_in, inputs.get("image_mask"), inputs)
        inputs["hidden_states"] = expand(ffn_out, streams, ffn_mix[1], ffn_mix[2])
        inputs["pre_mix"] = ffn_mix[0]
        probe("ffn_out", ffn_out)
        probe("h", inputs["hidden_states"])
        probe("pre_mix", inputs["pre_mix"])
        return tuple(inputs[name.removesuffix("_out")] for name in outputs)
