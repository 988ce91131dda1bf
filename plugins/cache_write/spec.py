"""Contract of `CacheWrite`: write a step's rows into a cache at each batch row's own position."""

from engram_trt.plugins.spec import Attribute, Operand, PluginSpec, Tolerance

APPEND, RING = 0, 1

SPEC = PluginSpec(
    name="CacheWrite",
    inputs=(
        Operand(name="cache", dtype="C", shape=("batch", "capacity", "width"), meaning="updated in place"),
        Operand(name="update", dtype="C", shape=("batch", "rows", "width"), meaning="rows to write, oldest first"),
        Operand(
            name="write_positions",
            dtype="int64",
            shape=("batch",),
            meaning="position of the first row; a ring takes it modulo its capacity",
        ),
    ),
    outputs=(Operand(name="cache_out", dtype="C", shape=("batch", "capacity", "width"), meaning="the same buffer"),),
    attributes=(Attribute(name="mode", kind="int", meaning="0 append (position is the slot), 1 ring"),),
    aliases={"cache_out": "cache"},
    tolerance=Tolerance(rtol=0.0, atol=0.0),
)
