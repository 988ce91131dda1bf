"""Compile the kernels that a build's plugins can launch; as a process of its own, since a compiler may run away.

Run as a module it compiles the jobs of a JSON file, one after the other, and records each as soon as it is there,
so that what was compiled before a stop is not compiled again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engram_trt.configs.errors import BackendError
from engram_trt.export.engines.model import PluginNode
from engram_trt.export.lifeline import end_with_parent
from engram_trt.plugins.kernels.plan import SHARED_MEMORY_LIMIT, Variant
from engram_trt.plugins.trt_kernels import KernelLibrary, KernelRecord
from engram_trt.plugins.trt_plugins import plugin_of

RECORDS_SUFFIX = ".kernel.json"


def needed_variants(nodes: Iterable[tuple[PluginNode, str]], targets: Iterable[int]) -> tuple[tuple[int, Variant], ...]:
    """Every kernel the nodes of some stages can launch.

    Args:
        nodes: nodes with the dtype of their stage.
        targets: compute capabilities.
    """
    distinct = {(node.op, dtype, node.num_inputs, tuple(sorted(node.attributes.items()))) for node, dtype in nodes}
    found: dict[tuple[int, Variant], None] = {}
    for sm in targets:
        for op, dtype, num_inputs, attributes in sorted(distinct):
            for variant in plugin_of(op).variants(dtype, num_inputs, dict(attributes), sm):
                found[sm, variant] = None
    return tuple(found)


def kernel_key(variant: Variant, sm: int, code_digest: str) -> str:
    """Name of a compiled variant: what it is, for which GPU, from which sources."""
    return hashlib.sha256(f"{sm}|{variant.op}|{variant.label}|{code_digest}".encode()).hexdigest()[:32]


def compile_into(folder: Path, variant: Variant, sm: int, key: str) -> KernelRecord:
    """Compile one variant, write image and record.

    Raises:
        BackendError: it needs more shared memory than the GPU has.
    """
    from engram_trt.plugins.kernels.ahead_of_time import compile_variant

    compiled = compile_variant(variant, sm)
    if compiled.shared_bytes > SHARED_MEMORY_LIMIT[sm]:
        raise BackendError(
            f"{variant.op}: kernel {variant.label} for sm_{sm}",
            found=f"{compiled.shared_bytes:,} bytes of shared memory",
            expected=f"at most {SHARED_MEMORY_LIMIT[sm]:,}",
            remedy="Use the versions of Triton that this project pins.",
        )
    record = KernelRecord(
        op=variant.op,
        label=variant.label,
        sm=sm,
        entry=compiled.entry,
        sha256=hashlib.sha256(compiled.cubin).hexdigest(),
        num_bytes=len(compiled.cubin),
        num_threads=compiled.num_threads,
        shared_bytes=compiled.shared_bytes,
        parameters=compiled.parameters,
    )
    (folder / record.file_name).write_bytes(compiled.cubin)
    partial = folder / f"{key}.partial"
    partial.write_text(json.dumps(record.to_json()))
    partial.replace(folder / f"{key}{RECORDS_SUFFIX}")
    return record


def find_kernel(folder: Path, key: str) -> KernelRecord | None:
    """A compiled variant, if its record and image are there and whole."""
    try:
        record = KernelRecord.from_json(json.loads((folder / f"{key}{RECORDS_SUFFIX}").read_bytes()))
        content = (folder / record.file_name).read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if hashlib.sha256(content).hexdigest() == record.sha256 else None


def read_kernels(folder: Path) -> KernelLibrary:
    """All kernels of a folder."""
    keys = [path.name.removesuffix(RECORDS_SUFFIX) for path in sorted(folder.glob(f"*{RECORDS_SUFFIX}"))]
    found = (find_kernel(folder, key) for key in keys)
    return KernelLibrary(folder, [record for record in found if record is not None])


def variant_to_json(variant: Variant) -> dict[str, Any]:
    """Plain JSON of a variant."""
    return {name: getattr(variant, name) for name in variant.__slots__}


def variant_from_json(document: Mapping[str, Any]) -> Variant:
    """The inverse of `variant_to_json`."""
    pairs = {name: tuple((key, value) for key, value in document[name]) for name in ("signature", "constants")}
    return Variant(**{**document, **pairs, "unaligned": tuple(document["unaligned"])})


def main(path: str) -> int:
    """Compile the kernels of a job file: {"folder", "kernels": [{"key", "sm", "variant"}]}."""
    end_with_parent()
    job = json.loads(Path(path).read_text())
    folder = Path(job["folder"])
    for item in job["kernels"]:
        variant = variant_from_json(item["variant"])
        try:
            compile_into(folder, variant, item["sm"], item["key"])
        except BackendError as error:
            print(error, file=sys.stderr)
            return 2
        except Exception:
            # The compiler's own trace follows; it does not say which kernel it was at work on.
            print(f"{variant.op}: kernel {variant.label} for sm_{item['sm']}", file=sys.stderr)
            raise
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
