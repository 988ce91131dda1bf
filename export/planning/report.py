"""A plan as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

GIB = 1 << 30
_COLUMNS = (
    "dense_weights",
    "experts",
    "engram_tables",
    "caches",
    "activations",
    "engram_staging",
    "indexer_workspace",
    "intermediates",
)


def gib(num_bytes: int) -> str:
    """Two digits; what is small but not nothing says so."""
    return f"{num_bytes / GIB:.2f}" if num_bytes == 0 or num_bytes >= GIB // 100 else "<0.01"


def milliseconds(microseconds: int) -> str:
    """With one digit."""
    return f"{microseconds / 1000:,.1f} ms"


def report_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """The document of `Plan.to_json` with its verdict, line by line."""
    yield from _model_lines(document)
    yield from _device_lines(document)
    yield from _host_lines(document["host"])
    yield from _time_lines(document)
    yield from _verdict_lines(document["verdict"])


def _model_lines(document: Mapping[str, Any]) -> Iterator[str]:
    deployment, cache = document["deployment"], document["cache"]
    yield (
        f"{document['model']}: {document['checkpoint_bytes']:,} bytes, {document['checkpoint_tensors']:,} tensors in "
        f"{document['checkpoint_shards']} shards, {document['parameters']:,} parameters"
    )
    tables = ", ".join(f"layer {layer}: {name}" for layer, name in deployment["engram_residency"].items())
    yield (
        f"{deployment['dtype']}, batch {deployment['batch']}, context {deployment['context']:,}, "
        f"{deployment['step_tokens']:,} tokens a step; Engram tables: {tables or 'none'}"
    )
    yield (
        f"caches: {cache['packed_bytes_per_token']} bytes per token packed, {cache['allocated_bytes_per_token']:,} as "
        f"they are held, and {cache['allocated_window_slot_bytes']:,} per window slot and layer"
    )


def _device_lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    heads = [column.replace("_", " ") for column in _COLUMNS]
    yield f"{'GiB':8} {'phase':8} " + " ".join(f"{head.split()[-1]:>13}" for head in heads) + f" {'total':>9}  stages"
    for device in document["devices"]:
        stages = f"{device['stages'][0]} .. {device['stages'][-1]}"
        for phase, parts in device["phases"].items():
            cells = " ".join(f"{gib(parts.get(column, 0)):>13}" for column in _COLUMNS)
            line = f"{device['device']:8} {phase:8} {cells} {gib(parts['total']):>9}"
            yield f"{line}  {stages}" if phase == "load" else line
    engines = document["engines"]
    yield f"{engines['plans']} engines for {engines['stages']} stages"
    for name, links in document["traffic"].items():
        total = sum(link["bytes"] for link in links)
        if total:
            yield f"between devices per {name} step: {total:,} bytes over {len(links)} links"


def _host_lines(host: Mapping[str, Any]) -> Iterator[str]:
    export, build, run = host["export"], host["build"], host["run"]
    yield ""
    yield (
        f"export: {gib(export['disk_bytes'])} GiB of disk ({gib(export['disk_bytes_with_copied_experts'])} with "
        f"--copy-experts), {gib(export['memory_bytes'])} GiB of memory in one process and at most "
        f"{gib(export['max_memory_bytes'])} in all, {gib(export['read_bytes'])} GiB to read"
    )
    yield f"build: {gib(build['disk_bytes_about'])} GiB of disk, {gib(build['memory_bytes'])} GiB of memory a builder"
    parts = ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in run.items() if name != "total" and size)
    yield f"run: {gib(run['total'])} GiB of host memory ({parts})"


def _time_lines(document: Mapping[str, Any]) -> Iterator[str]:
    ceilings, floors, placements = document["ceilings"], document["floors"], document["placements"]
    sources = sorted(set(ceilings["sources"].values()))
    yield ""
    yield (
        f"floors over {' and '.join(sources)} ceilings ({ceilings['memory_bytes_per_s'] / 1e9:,.0f} GB/s, "
        f"{ceilings['operations_per_s'] / 1e12:,.1f} T operations/s, "
        f"link {ceilings['link_bytes_per_s'] / 1e9:,.0f} GB/s):"
    )
    decode, prefill = floors["decode"], floors["prefill"]
    yield f"  decode step: {milliseconds(decode['step_us'])}, {decode['read_bytes']:,} bytes read"
    yield (
        f"  prefill step: {milliseconds(prefill['step_us'])}; the whole context in {prefill['steps']:,} steps: "
        f"{prefill['context_us'] / 1e6:,.2f} s"
    )
    if decode["engram_fetch_us"]:
        yield f"  Engram rows from a cold disk: {milliseconds(decode['engram_fetch_us'])} a decode step"
    pipeline, spread = placements["pipeline"], placements["experts_spread"]
    yield (
        f"  batch 1: a token passes all stages in turn, {milliseconds(pipeline['token_us'])} on "
        f"{pipeline['devices_used']} device(s), of which one works at a time"
    )
    if spread["devices_used"] > 1:
        yield (
            f"  experts spread over {spread['devices_used']} devices (`experts` in the deployment): "
            f"{milliseconds(spread['token_us'])}, {gib(spread['bytes_per_device'])} GiB a device, "
            f"{spread['exchanged_bytes_per_token']:,} bytes in {spread['exchanges_per_token']} exchanges a token"
        )


def _verdict_lines(verdict: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    if verdict["fits"] is None:
        needed = gib(verdict["needed_per_device_bytes"])
        yield f"Needs {needed} GiB per device; give --gpu-memory, --host-memory or --disk for a verdict."
        return
    if verdict["fits"]:
        yield "Fits."
        return
    yield "Does not fit:"
    for item in verdict["shortfalls"]:
        yield (
            f"  {item['what']}: {item['needed_bytes']:,} bytes needed, {item['available_bytes']:,} there "
            f"({gib(item['needed_bytes'] - item['available_bytes'])} GiB short)"
        )
    for number, option in enumerate(verdict["options"]):
        words = "Smallest change that fits" if number == 0 else "Or"
        parts = zip(*(option[key].split(", ") for key in ("setting", "now", "then")), strict=True)
        yield f"{words}: " + ", ".join(f"{setting} {now} -> {then}" for setting, now, then in parts)
    if not verdict["options"]:
        most = verdict["largest_number_of_devices"]
        yield f"No residency, limit or number of devices makes it fit (the chain has {most} pieces for devices)."
