"""Contract of `HyperConnectionMix`: reading, writing and combining weights of the residual streams (spec 4)."""

from engram_trt.plugins.spec import Attribute, Operand, PluginSpec

SPEC = PluginSpec(
    name="HyperConnectionMix",
    inputs=(
        Operand(
            name="hidden_states",
            dtype="T",
            shape=("batch", "tokens", "hc_mult", "dim"),
            meaning="residual streams",
        ),
        Operand(
            name="hc_fn",
            dtype="float32",
            shape=("hc_mixes", "hc_dim"),
            meaning="projection of the flat streams",
        ),
        Operand(name="hc_scale", dtype="float32", shape=(3,), meaning="factors of pre, post and comb"),
        Operand(name="hc_base", dtype="float32", shape=("hc_mixes",), meaning="offsets"),
    ),
    outputs=(
        Operand(name="pre", dtype="float32", shape=("batch", "tokens", "hc_mult"), meaning="reading weights"),
        Operand(name="post", dtype="float32", shape=("batch", "tokens", "hc_mult"), meaning="writing weights"),
        Operand(
            name="comb",
            dtype="float32",
            shape=("batch", "tokens", "hc_mult", "hc_mult"),
            meaning="row = source stream, column = destination; columns sum to one",
        ),
    ),
    attributes=(
        Attribute(name="hc_sinkhorn_iters", kind="int", meaning="column normalisations"),
        Attribute(name="hc_eps", kind="float", meaning="added to pre, to every entry of comb and to each divisor"),
        Attribute(name="norm_eps", kind="float", meaning="added to the mean square of the flat streams"),
    ),
)
