"""Kernels on one GPU, in one call under eight minutes: are they right, and how near are they to the machine?

    python tests/benchmarks/gpu_check.py [--json FILE] [--only OP] [--no-timing]
    python tests/benchmarks/gpu_check.py --dry-run      # every case on tiny shapes under Triton's interpreter

Needs torch with CUDA, Triton and this checkout; the package need not be installed. Without a GPU it says "not
measured" and exits with 0. Correctness compares with the references on fresh random inputs, outputs filled with
poison. Times are medians of graph replays; ratios are against a copy and a product measured in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

DRY_RUN = "--dry-run" in sys.argv
if DRY_RUN:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, at import
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / ".typings"))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from engram_trt.plugins.cache_write import reference as cache_write  # noqa: E402
from engram_trt.plugins.engram_gather import reference as engram_gather  # noqa: E402
from engram_trt.plugins.engram_hash import reference as engram_hash  # noqa: E402
from engram_trt.plugins.hyper_connection_mix import reference as hyper_connection_mix  # noqa: E402
from engram_trt.plugins.indexer import reference as indexer  # noqa: E402
from engram_trt.plugins.kernels.launcher import describe, execute, launch, launch_interpreted  # noqa: E402
from engram_trt.plugins.kernels.plan import Launch  # noqa: E402
from engram_trt.plugins.kernels.registry import planner_of  # noqa: E402
from engram_trt.plugins.moe_expert_outputs import reference as moe_expert_outputs  # noqa: E402
from engram_trt.plugins.moe_experts import reference as moe_experts  # noqa: E402
from engram_trt.plugins.quantize_dequantize import reference as quantize_dequantize  # noqa: E402
from engram_trt.plugins.sparse_attention import reference as sparse_attention  # noqa: E402

DEVICE = "cpu" if DRY_RUN else "cuda"
TIME_LIMIT_S = 7.5 * 60
REFERENCES: dict[str, Callable[..., Any]] = {
    "CacheWrite": cache_write.cache_write,
    "QuantizeDequantize": quantize_dequantize.quantize_dequantize,
    "EngramHash": engram_hash.engram_hash,
    "EngramGather": engram_gather.engram_gather,
    "HyperConnectionMix": hyper_connection_mix.hyper_connection_mix,
    "SparseAttention": sparse_attention.sparse_attention,
    "MoEExperts": moe_experts.moe_experts,
    "MoEExpertOutputs": moe_expert_outputs.moe_expert_outputs,
    "Indexer": indexer.indexer,
}
EXACT = ("CacheWrite", "QuantizeDequantize", "EngramHash", "EngramGather", "Indexer")
RELATIVE_ERROR = {torch.float32: 1e-5, torch.bfloat16: 6e-3}
"""Largest accepted norm of the difference over the reference's norm, for the ops that are not exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One call of an op. `ideal_bytes` and `ideal_flops` bound its time from below."""

    op: str
    name: str
    tensors: dict[str, Tensor | None]
    attributes: dict[str, int | float]
    ideal_bytes: int = 0
    ideal_flops: int = 0
    steps: tuple[str, ...] = ()


def normal(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.randint(low, high, shape, device=DEVICE, dtype=dtype)


def cache_case(name: str, batch: int, rows: int, width: int, dtype: torch.dtype, mode: int) -> Case:
    capacity = rows * 3 + 1
    update = normal(batch, rows, width).to(dtype)
    tensors: dict[str, Tensor | None] = {
        "cache": normal(batch, capacity, width).to(dtype),
        "update": update,
        "write_positions": integers(0, capacity - rows + 1 if mode == 0 else 10**6, batch),
    }
    moved = 2 * update.numel() * update.element_size()
    return Case(op="CacheWrite", name=name, tensors=tensors, attributes={"mode": mode}, ideal_bytes=moved)


def quantize_case(name: str, rows: int, width: int, dtype: torch.dtype, format: int) -> Case:
    x = normal(rows, width, dtype=dtype) * torch.exp(4 * normal(rows, 1)).to(dtype)
    moved = 2 * x.numel() * x.element_size()
    return Case(op="QuantizeDequantize", name=name, tensors={"x": x}, attributes={"format": format}, ideal_bytes=moved)


def hash_case(name: str, batch: int, tokens: int) -> Case:
    tensors: dict[str, Tensor | None] = {
        "compressed_ids": integers(-1, 99092, batch, tokens),
        "token_history": integers(-1, 99092, batch, 3),
        "multipliers": integers(0, 46539438283891, 2, 4) * 2 + 1,
        "primes": integers(16_000_000, 16_001_000, 2, 3, 8),
        "offsets": integers(0, 368_000_000, 2, 24),
    }
    moved = batch * tokens * (8 + 48 * 8)
    return Case(op="EngramHash", name=name, tensors=tensors, attributes={"pad_id": 2}, ideal_bytes=moved)


def gather_case(name: str, table_rows: int, tokens: int, width: int = 256, out_dtype: int = 16) -> Case:
    ids = integers(0, table_rows, 1, tokens, 24)
    ids[..., -1], ids[..., 0] = table_rows - 1, min(8_388_608, table_rows - 1)
    rows = torch.empty(table_rows, width, dtype=torch.int8, device=DEVICE).random_(-128, 127)
    tensors: dict[str, Tensor | None] = {
        "engram_ids": ids,
        "engram_rows": rows,
        "engram_scales": integers(110, 120, table_rows, width // 32, dtype=torch.int8),
    }
    # Sectors of 32 bytes: a row, the one that holds its scales, its id, and the output.
    moved = ids.numel() * (width + 32 + 8 + width * (2 if out_dtype == 16 else 4))
    return Case(op="EngramGather", name=name, tensors=tensors, attributes={"out_dtype": out_dtype}, ideal_bytes=moved)


def mix_case(name: str, tokens: int, dim: int, dtype: torch.dtype) -> Case:
    x, fn = normal(1, tokens, 4, dim, dtype=dtype), normal(24, 4 * dim, scale=0.02)
    tensors: dict[str, Tensor | None] = {
        "hidden_states": x,
        "hc_fn": fn,
        "hc_scale": normal(3),
        "hc_base": normal(24),
    }
    moved = x.numel() * x.element_size() + fn.numel() * 4 + tokens * 24 * 4
    attributes = {"hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-20}
    return Case(op="HyperConnectionMix", name=name, tensors=tensors, attributes=attributes, ideal_bytes=moved)


def attention_case(
    name: str, batch: int, tokens: int, heads: int, dim: int, window: int, topk: int, dtype: torch.dtype
) -> Case:
    entries = max(4 * topk, 1)
    q = normal(batch, tokens, heads, dim, dtype=dtype)
    tensors: dict[str, Tensor | None] = {
        "q": q,
        "window_kv": normal(batch, window + tokens, dim, dtype=dtype),
        "start_positions": integers(window, 10**6, batch),
        "attn_sink": normal(heads),
        "compressed_kv": normal(batch, entries, dim, dtype=dtype) if topk else None,
        "topk_indices": integers(-1, entries, batch, tokens, topk, dtype=torch.int32) if topk else None,
    }
    keys = window + topk
    return Case(
        op="SparseAttention",
        name=name,
        tensors=tensors,
        attributes={"window_size": window, "softmax_scale": dim**-0.5},
        # A token's rows are read once if no other token shares them.
        ideal_bytes=q.element_size() * (2 * q.numel() + batch * min(tokens * keys, window + tokens + entries) * dim),
        ideal_flops=4 * batch * tokens * heads * keys * dim,
    )


def experts_case(
    name: str, rows: int, dims: tuple[int, int, int, int], dtype: torch.dtype, weights: dict[str, Tensor], format: int
) -> Case:
    experts, dim, inter, activated = dims
    scores, bias = torch.rand(rows, experts, device=DEVICE), normal(rows, experts, scale=0.1)
    tensors: dict[str, Tensor | None] = {
        "ffn_in": normal(rows, dim, dtype=dtype),
        "scores": scores,
        "selection_bias": bias,
        **weights,
    }
    chosen = torch.topk(scores + bias, activated).indices.unique().numel()
    return Case(
        op="MoEExperts",
        name=name,
        tensors=tensors,
        attributes={
            "n_activated_experts": activated,
            "norm_topk_prob": 1,
            "route_scale": 1.5,
            "swiglu_limit": 10.0,
            "activation_format": format,
        },
        ideal_bytes=chosen * 3 * dim * inter * 17 // 32,  # codes and scales
        ideal_flops=2 * rows * activated * 3 * dim * inter,
    )


def listed_case(whole: Case, low: int, high: int) -> tuple[Case, Tensor, Tensor]:
    """`MoEExpertOutputs` of a case of `MoEExperts` with the experts `low` to `high` alone.

    Returns:
        the case, whose rows are those with an expert there; which slots of which rows of the whole have one; and the
        chosen ids of the whole.
    """
    scores, bias, x = (whole.tensors[name] for name in ("scores", "selection_bias", "ffn_in"))
    assert scores is not None
    assert bias is not None
    assert x is not None
    ids, weights = moe_experts.choose_experts(
        scores,
        bias,
        int(whole.attributes["n_activated_experts"]),
        int(whole.attributes["norm_topk_prob"]),
        whole.attributes["route_scale"],
    )
    here = (ids >= low) & (ids < high)
    rows = here.any(dim=1)
    bound = {n: t[low:high] for n, t in whole.tensors.items() if n.startswith("experts_") and t is not None}
    dim, inter = x.shape[1], bound["experts_w2"].shape[2] * 2
    case = Case(
        op="MoEExpertOutputs",
        name=f"{whole.name}, experts {low}..{high}",
        tensors={
            "ffn_in": x[rows],
            "expert_ids": torch.where(here, ids - low, -1)[rows].to(torch.int32),
            "expert_weights": weights[rows].contiguous(),
            **bound,
        },
        attributes={name: whole.attributes[name] for name in ("swiglu_limit", "activation_format")},
        ideal_bytes=ids[here].unique().numel() * 3 * dim * inter * 17 // 32,
        ideal_flops=2 * int(here.sum()) * 3 * dim * inter,
    )
    return case, here, ids


def packed_experts(experts: int, dim: int, inter: int) -> dict[str, Tensor]:
    found = {}
    for name, rows, columns in (("w1", inter, dim), ("w2", dim, inter), ("w3", inter, dim)):
        codes = torch.empty(experts, rows, columns // 2, dtype=torch.int8, device=DEVICE)
        scales = torch.empty(experts, rows, columns // 32, dtype=torch.int8, device=DEVICE)
        found[f"experts_{name}"] = codes.random_(-128, 127)
        found[f"experts_{name}_scale"] = scales.random_(116, 120)
    return found


def index_case(
    name: str,
    tokens: int,
    visible: int,
    dtype: torch.dtype,
    role: int = 0,
    topk: int = 512,
    blocks: int = 2048,
    heads: int = 32,
    width: int = 128,
    steps: tuple[str, ...] = (),
) -> Case:
    candidates = None
    if role == 2:
        candidates = integers(0, max(1, visible // 8), 1, tokens, blocks, dtype=torch.int32)
    # Small integers make every score exact, so that selections can be compared bit by bit; ties abound.
    tensors: dict[str, Tensor | None] = {
        "index_q": integers(-2, 3, 1, tokens, heads, width).to(dtype),
        "index_weights": integers(-2, 4, 1, tokens, heads).to(dtype),
        "index_keys": integers(-2, 3, 1, visible, width).to(dtype),
        "start_positions": torch.tensor([visible - tokens], device=DEVICE),
        "visible_entries": torch.arange(visible, device=DEVICE),
        "candidate_blocks": candidates,
    }
    attributes = {
        "compress_ratio": 1,
        "index_topk": topk,
        "role": role,
        "candidate_topk_blocks": blocks,
        "candidate_block_size": 8,
    }
    size = torch.empty(0, dtype=dtype).element_size()
    scored = min(visible, blocks * 8) if role == 2 else visible
    selecting = bool(steps) and "index_scores_kernel" not in steps
    return Case(
        op="Indexer",
        name=name,
        tensors=tensors,
        attributes=attributes,
        ideal_bytes=tokens * visible * 4 if selecting else scored * width * size * (tokens if role == 2 else 1),
        ideal_flops=0 if selecting else 2 * tokens * scored * heads * width,
        steps=steps,
    )


def correctness_cases() -> Iterator[Case]:
    """Every kernel at small, odd and (on a GPU) released sizes."""
    full = not DRY_RUN
    for dtype in (torch.float32, torch.bfloat16):
        yield cache_case("append odd", 2, 5, 13, dtype, 0)
        yield cache_case("ring", 3, 700 if full else 3, 512 if full else 24, dtype, 1)
        for format in (0, 1, 2):
            yield quantize_case(f"format {format}", 4097 if full else 5, 512 if full else 96, dtype, format)
        yield mix_case("odd", 3, 48, dtype)
        yield attention_case("odd", 2, 3, 5, 48, 8, 19, dtype)
        yield attention_case("window only", 1, 2, 3, 64, 40, 0, dtype)
        for role in (0, 1, 2):
            yield index_case(f"role {role} odd", 3, 133, dtype, role, topk=7, blocks=5, heads=3, width=32)
        small = packed_experts(5, 64, 96)
        yield experts_case("odd", 7, (5, 64, 96, 2), dtype, small, 0)
        yield listed_case(experts_case("odd", 7, (5, 64, 96, 2), dtype, small, 0), 1, 4)[0]
        if full:
            yield mix_case("released", 333, 5120, dtype)
            yield attention_case("released decode", 3, 1, 64, 512, 128, 512, dtype)
            yield attention_case("released prefill", 1, 200, 64, 512, 128, 512, dtype)
            for role in (0, 1, 2):
                yield index_case(f"role {role} long", 3, 70_001, dtype, role)
            some = packed_experts(32, 5120, 2304)
            yield experts_case("released widths", 61, (32, 5120, 2304, 6), dtype, some, 0)
            yield listed_case(experts_case("released widths", 61, (32, 5120, 2304, 6), dtype, some, 0), 0, 16)[0]
    yield hash_case("tokens", 2, 4099 if full else 37)
    yield gather_case("float32", 1000, 5, width=96, out_dtype=1)
    yield gather_case("bfloat16", 9_000_000 if full else 300, 61 if full else 3)


def timing_cases() -> Iterator[Case]:
    """Released shapes; tables and caches several times the L2."""
    half = torch.bfloat16
    for tokens in (171, 2731):
        yield gather_case(f"{tokens * 24} rows", 8_000_000, tokens)
    yield hash_case("16384 tokens", 1, 16384)
    yield cache_case("4096 rows of 512", 1, 4096, 512, half, 1)
    yield quantize_case("fp8, 8192 x 5120", 8192, 5120, half, 0)
    for tokens in (1, 8, 2048):
        yield mix_case(f"{tokens} tokens", tokens, 5120, half)
    for batch in (1, 8, 64, 256):
        yield attention_case(f"decode {batch}", batch, 1, 64, 512, 128, 512, half)
    yield attention_case("prefill 2048", 1, 2048, 64, 512, 128, 512, half)
    for visible in (4096, 65536, 1_048_576):
        for tokens in (1, 16):
            yield index_case(f"scores {tokens} x {visible}", tokens, visible, half, steps=("index_scores_kernel",))
    yield index_case("top-k 16 x 1048576", 16, 1_048_576, half, steps=SELECTION)
    for role in (0, 1, 2):
        yield index_case(f"role {role}, 8 x 65536", 8, 65536, half, role)
    weights = packed_experts(384, 5120, 2304)
    for rows in (1, 8, 64, 512):
        whole = experts_case(f"{rows} tokens", rows, (384, 5120, 2304, 6), half, weights, 0)
        yield whole
        yield listed_case(whole, 0, 96)[0]


SELECTION = ("key_histogram_kernel", "count_selected_kernel", "write_selected_kernel")


def outputs_of(case: Case) -> dict[str, Tensor]:
    """Fresh output buffers full of NaN or of the largest integer."""
    planner = planner_of(case.op)
    found = {}
    for name, info in planner.outputs({k: describe(v) for k, v in case.tensors.items()}, case.attributes).items():
        if name not in planner.spec.aliases:
            dtype = getattr(torch, info.dtype)
            poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
            found[name] = torch.full(info.shape, poison, dtype=dtype, device=DEVICE)
    return found


def run_case(case: Case, outputs: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    run = launch_interpreted if DRY_RUN else launch
    return run(case.op, case.tensors, case.attributes, outputs)


def check(case: Case) -> str:
    """Empty where the kernel agrees with the reference, else what differs."""
    planner = planner_of(case.op)
    arguments = [case.tensors.get(name) for name in planner.spec.input_names]
    expected = REFERENCES[case.op](
        *(None if a is None else a.clone() for a in arguments),
        *(case.attributes[n] for n in planner.spec.attribute_names),
    )
    values = expected if isinstance(expected, tuple) else (expected,)
    results = run_case(case, outputs_of(case))
    for name, value in zip(planner.spec.output_names, values, strict=False):
        if value is None:
            continue
        result = results[name]
        if case.op in EXACT:
            same = (result == value) | ((result != result) & (value != value))
            if not bool(same.all()):
                where = (~same).nonzero()[0].tolist()
                return f"{name} differs first at {where}: {result[tuple(where)]} != {value[tuple(where)]}"
        else:
            error = (result.float() - value.float()).norm() / value.float().norm().clamp(min=1e-30)
            dtype = next(t.dtype for t in arguments if t is not None)
            if not float(error) <= RELATIVE_ERROR[dtype]:
                return f"{name} off by {float(error):.2e} of its norm"
    return ""


def batch_mates(dtype: torch.dtype) -> str:
    """Empty where an expert row's bits are the same alone and among others."""
    dims = (32, 5120, 2304, 6) if not DRY_RUN else (5, 64, 96, 2)
    rows = 513 if not DRY_RUN else 5
    case = experts_case("batch mates", rows, dims, dtype, packed_experts(*dims[:3]), 0)
    together = run_case(case)["routed_output"]
    for first, last in ((0, 1), (1, 9 if not DRY_RUN else 3), (rows - 1, rows)):
        part = {
            n: t[first:last] if n in ("ffn_in", "scores", "selection_bias") and t is not None else t
            for n, t in case.tensors.items()
        }
        alone = run_case(dataclasses.replace(case, tensors=part))["routed_output"]
        if not torch.equal(alone, together[first:last]):
            return f"rows {first}..{last} change with their batch"
    return ""


def spread_experts(dtype: torch.dtype) -> str:
    """Empty where experts in three parts, summed in ascending id, have the bits of all experts in one call."""
    dims, rows = ((5, 64, 96, 3), 5) if DRY_RUN else ((32, 5120, 2304, 6), 300)
    case = experts_case("spread", rows, dims, dtype, packed_experts(*dims[:3]), 0)
    # Weights that are not divided by their sum have the same bits however they are computed.
    case = dataclasses.replace(case, attributes={**case.attributes, "norm_topk_prob": 0})
    total = torch.zeros(rows, dims[1], device=DEVICE)
    outputs = torch.full((rows, dims[3], dims[1]), float("nan"), device=DEVICE)
    bounds = (0, dims[0] // 4, dims[0] // 2, dims[0])
    for low, high in itertools.pairwise(bounds):
        part, here, ids = listed_case(case, low, high)
        result = run_case(part, outputs_of(part))["expert_outputs"]
        outputs[here] = result[here[here.any(dim=1)]].float()
    for slots in torch.argsort(ids, dim=1).unbind(1):
        total = total + outputs[torch.arange(rows, device=DEVICE), slots]
    return "" if torch.equal(total, run_case(case)["routed_output"]) else "the sum of three parts has other bits"


def median_ms(*turns: Callable[[], Any], replays: int = 20) -> float:
    """Median time of one call, from replays of a graph that holds several; `turns` are taken one after another."""
    calls = max(len(turns), 4)
    for _ in range(2):
        turns[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [turns[number % len(turns)]() for number in range(calls)]  # alive, so that outputs differ too
    del kept
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / calls)
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """Bytes per second of a large copy (read plus written) and FLOP per second of a large bf16 product."""
    source = torch.empty(2**30, dtype=torch.int8, device=DEVICE).random_(0, 100)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / median_ms(lambda: target.copy_(source)) * 1e3
    a, b = normal(8192, 8192, dtype=torch.bfloat16), normal(8192, 8192, dtype=torch.bfloat16)
    return copy, 2 * 8192**3 / median_ms(lambda: a @ b) * 1e3


def timed(case: Case) -> float:
    """Milliseconds of a case, or of the launches it names."""
    if case.op == "EngramGather":
        # Other rows each time: the rows of one call would stay in the L2.
        rows = case.tensors["engram_rows"]
        ids = case.tensors["engram_ids"]
        assert rows is not None
        assert ids is not None
        drawn = [dict(case.tensors, engram_ids=integers(0, rows.shape[0], *ids.shape)) for _ in range(64)]
        turns = [partial(run_case, dataclasses.replace(case, tensors=tensors)) for tensors in drawn]
        return median_ms(*turns)
    if not case.steps:
        return median_ms(lambda: run_case(case))
    planner = planner_of(case.op)
    major, minor = torch.cuda.get_device_capability()
    plan = planner.plan({k: describe(v) for k, v in case.tensors.items()}, case.attributes, 10 * major + minor)
    named = {k: v for k, v in case.tensors.items() if v is not None} | outputs_of(case)
    chosen = tuple(s for s in plan.steps if not isinstance(s, Launch) or s.variant.function in case.steps)
    part = dataclasses.replace(plan, steps=chosen)
    return median_ms(lambda: execute(part, named, torch.device(DEVICE), interpret=False))


def decode_step_ms() -> float:
    """The ops of one released layer (an index source over 65,536 entries) for one token, in one graph."""
    half = torch.bfloat16
    cases = [
        mix_case("attention", 1, 5120, half),
        quantize_case("window row", 1, 512, half, 0),
        cache_case("window row", 1, 1, 512, half, 1),
        index_case("index", 1, 65536, half, 2),
        attention_case("attention", 1, 1, 64, 512, 128, 512, half),
        mix_case("feed-forward", 1, 5120, half),
        experts_case("experts", 1, (384, 5120, 2304, 6), half, packed_experts(384, 5120, 2304), 0),
    ]
    return median_ms(lambda: [run_case(case) for case in cases])


def main() -> int:
    """Check, time, print a table, write JSON; 1 where a kernel is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the full record here")
    parser.add_argument("--only", default="", help="only this op")
    parser.add_argument("--no-timing", action="store_true", help="correctness only")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes under the interpreter, no GPU")
    arguments = parser.parse_args()
    started = time.monotonic()
    if not DRY_RUN and not torch.cuda.is_available():
        print("not measured: no CUDA device")
        if arguments.json:
            arguments.json.write_text(json.dumps({"measured": False}) + "\n", encoding="utf-8")
        return 0
    torch.manual_seed(time.time_ns() % 2**31)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # the references round once
    record: dict[str, Any] = {"measured": not DRY_RUN, "seed": torch.initial_seed(), "torch": torch.__version__}
    if not DRY_RUN:
        record["device"] = torch.cuda.get_device_name()
    wrong = []
    for case in correctness_cases():
        if arguments.only in ("", case.op):
            problem = check(case)
            wrong += [f"{case.op} {case.name}: {problem}"] if problem else []
            print(f"{'WRONG' if problem else 'ok':5} {case.op} {case.name} {problem}", flush=True)
    if arguments.only in ("", "MoEExperts"):
        wrong += [f"MoEExperts: {p}" for d in (torch.float32, torch.bfloat16) if (p := batch_mates(d))]
    if arguments.only in ("", "MoEExpertOutputs"):
        wrong += [f"MoEExpertOutputs: {p}" for d in (torch.float32, torch.bfloat16) if (p := spread_experts(d))]
    if not arguments.only and not DRY_RUN:
        # A script's own folder is on its path.
        engine_check = importlib.import_module("engine_check")
        record["engines"] = engine_check.check_engines()
        engine_check.say(record["engines"])
        wrong += record["engines"].get("wrong", [])
    record["wrong"] = wrong
    if not DRY_RUN and not arguments.no_timing:
        record |= time_all(arguments.only, started)
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print("\n".join(wrong) if wrong else "all kernels agree with their references")
    return 1 if wrong else 0


def time_all(only: str, started: float) -> dict[str, Any]:
    """Times and ratios of the timing cases, as a printed table and as data."""
    copy, product = ceilings()
    print(f"\ncopy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s")
    print(f"{'op':20} {'case':24} {'ms':>9} {'floor ms':>9} {'ratio':>6}")
    rows = []
    for case in timing_cases():
        if only not in ("", case.op) or time.monotonic() - started > TIME_LIMIT_S:
            continue
        ms = timed(case)
        floor = max(case.ideal_bytes / copy, case.ideal_flops / product) * 1e3
        rows.append({"op": case.op, "case": case.name, "ms": ms, "floor_ms": floor, "ratio": floor / ms})
        print(f"{case.op:20} {case.name:24} {ms:9.4f} {floor:9.4f} {floor / ms:6.2f}", flush=True)
    step = decode_step_ms() if not only and time.monotonic() - started < TIME_LIMIT_S else None
    print(f"ops of one layer, one token: {'not measured' if step is None else f'{step:.4f} ms'}")
    return {"copy_bytes_per_s": copy, "bf16_flops_per_s": product, "times": rows, "decode_layer_ms": step}


if __name__ == "__main__":
    sys.exit(main())
