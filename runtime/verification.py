"""How much of an artefact is digested before it is used."""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engram_trt.configs.artifact import FileRecord, Manifest
    from engram_trt.runtime.resident_weights import ResidentWeights

NONE, HEADERS, FULL = "none", "headers", "full"
LEVELS = (NONE, HEADERS, FULL)
"""`none`: sizes only. `headers`: every file of the artefact by its digest, and the checkpoint by config, index and
shard headers. `full`: the weights that are bound out of the checkpoint by their digests as well."""


def add_verify_option(parser: argparse.ArgumentParser) -> None:
    """`--verify`, for verbs that open an artefact."""
    parser.add_argument(
        "--verify",
        choices=LEVELS,
        default=HEADERS,
        help="digests checked before use: none; headers, all files of the artefact (default); full, all weights too",
    )


def verify_files(root: Path, manifest: Manifest, level: str) -> None:
    """Check the files of an artefact; where no digest is asked for, that each is a file of its size.

    Raises:
        ArtifactError: naming the first file, in the manifest's order, that is not what it should be.
        CheckpointError: the external data of a graph.
    """
    from engram_trt.configs.onnx_external_data import check_external_data

    def check(record: FileRecord) -> None:
        (record.locate if level == NONE else record.verify)(root)

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for _ in pool.map(check, manifest.all_files()):
            pass
    for stage in manifest.stages:
        check_external_data(stage.onnx.locate(root), stage.data.locate(root))


def verify_residents(residents: ResidentWeights, manifest: Manifest, level: str) -> None:
    """At level `full`, read and digest what is bound out of the checkpoint; CheckpointError if it is not the same."""
    if level == FULL:
        for record in manifest.residents:
            residents.verify(record.key)
