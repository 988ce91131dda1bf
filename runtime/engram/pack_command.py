"""`engram-trt pack-engram`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.cli import Command

if TYPE_CHECKING:
    from engram_trt.configs.checkpoint import Checkpoint


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", metavar="CKPT", type=Path, help="a checkpoint in the released layout")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the packed files will be")
    parser.add_argument("--layers", metavar="IDS", help="only these Engram layers, as in 1,14")
    parser.add_argument("--verify", action="store_true", help="read the packed files again, compare every checksum")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")


def _run(arguments: argparse.Namespace) -> int:
    from engram_trt.configs.checkpoint import Checkpoint
    from engram_trt.runtime.engram.packing import pack_table, verify_packed
    from engram_trt.runtime.engram.progress import byte_bar
    from engram_trt.runtime.engram.tables import table_entries

    checkpoint = Checkpoint.open(arguments.checkpoint)
    layers = _layers(arguments.layers, checkpoint)
    facts: list[dict[str, Any]] = []
    for layer_id in layers:
        num_bytes = table_entries(checkpoint, layer_id)[2].num_bytes
        with byte_bar(f"packing layer {layer_id}", num_bytes) as progress:
            path = pack_table(checkpoint, layer_id, arguments.out, progress)
        if arguments.verify:
            with byte_bar(f"verifying layer {layer_id}", num_bytes) as progress:
                verify_packed(path, progress)
        facts.append({"layer": layer_id, "file": str(path), "bytes": path.stat().st_size})
    if arguments.json:
        print(json.dumps({"tables": facts, "verified": arguments.verify}))
    else:
        for fact in facts:
            print(f"{fact['file']}: {fact['bytes'] / 2**20:,.1f} MiB{', verified' if arguments.verify else ''}")
    return 0


def _layers(text: str | None, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The layers asked for; RequestError for what is no Engram layer of the checkpoint."""
    present = checkpoint.config.engram_layer_ids
    if checkpoint.partial_layers is not None:
        present = tuple(layer_id for layer_id in present if layer_id in checkpoint.partial_layers)
    wanted = [str(layer_id) for layer_id in present] if text is None else text.split(",")
    known = {str(layer_id): layer_id for layer_id in present}
    wrong = [entry for entry in wanted if entry not in known]
    if wrong or not wanted:
        raise RequestError(
            "--layers" if text is not None else str(checkpoint.root),
            found=f"{wrong[0]!r}" if wrong else "no Engram layer",
            expected=f"Engram layers, out of {', '.join(known) or 'none here'}",
            remedy="Write them as in 1,14, or leave the option out for all.",
        )
    return tuple(known[entry] for entry in dict.fromkeys(wanted))


COMMAND = Command(
    summary="pack Engram tables into page-friendly files",
    description=(
        "Write every Engram table to one file in which a row and its scales lie side by side and never cross a\n"
        "page: a fetch reads one page a row instead of two. A killed run is resumed by the same command. Use the\n"
        'files with residency = "packed" (or "host") and packed_folder = DIR under [engram] in a deployment file.'
    ),
    examples="""
    engram-trt pack-engram checkpoint --out packed
    engram-trt pack-engram checkpoint --out packed --layers 14 --verify
    """,
    configure=_configure,
    run=_run,
)
