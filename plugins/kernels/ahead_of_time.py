"""Compile a variant for a compute capability without a GPU, and read what the machine code needs."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engram_trt.plugins.kernels.plan import TRAILING_POINTERS, Variant

POINTER_DIVISIBILITY = 16

_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param \.[a-z](\d+)")
_GLOBAL_LOAD = re.compile(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bufs](\d+)\b")
_ASYNC_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^,;]*\[[^\]]*\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)")
_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """Machine code of one variant and what it needs.

    Args:
        variant: what was compiled.
        sm: compute capability.
        entry: name of the function in the cubin.
        cubin: ELF image for `cuModuleLoadData`.
        num_threads: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        registers: per thread.
        spill_bytes: stack and local memory per thread.
        widest_load_bytes: widest single load from global memory.
        parameters: sizes of the entry's parameters (b32, b64), the trailing scratch pointers included.
    """

    variant: Variant
    sm: int
    entry: str
    cubin: bytes
    num_threads: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    widest_load_bytes: int
    parameters: tuple[str, ...]

    def resources(self) -> dict[str, int]:
        """The figures that the committed resource table holds."""
        return {
            "registers": self.registers,
            "spill_bytes": self.spill_bytes,
            "shared_bytes": self.shared_bytes,
            "widest_load_bytes": self.widest_load_bytes,
        }


def compile_variant(variant: Variant, sm: int) -> CompiledKernel:
    """Compile with Triton's own pipeline (PTX, then ptxas); needs Triton, no GPU and no driver."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(variant.module), variant.function)
    constants = dict(variant.constants)
    signature = {name: dict(variant.signature).get(name, "constexpr") for name in function.arg_names}
    attributes = {
        (position,): [["tt.divisibility", POINTER_DIVISIBILITY]]
        for position, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") and name not in variant.unaligned
    }
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", sm, 32),
        options={"num_warps": variant.num_warps, "num_stages": variant.num_stages},
    )
    return _read(variant, sm, compiled)


def _read(variant: Variant, sm: int, compiled: Any) -> CompiledKernel:
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    entry = _ENTRY.search(ptx)
    if entry is None:
        raise RuntimeError(f"{variant.label}: no entry in the PTX")
    registers, spill_bytes = read_resources(cubin)
    return CompiledKernel(
        variant=variant,
        sm=sm,
        entry=compiled.metadata.name,
        cubin=cubin,
        num_threads=32 * compiled.metadata.num_warps,
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        spill_bytes=spill_bytes,
        widest_load_bytes=widest_load(ptx),
        parameters=tuple(f"b{bits}" for bits in _PARAMETER.findall(entry.group(2))),
    )


def widest_load(ptx: str) -> int:
    """Bytes of the widest load from global memory in a PTX text; 0 without one."""
    direct = (int(count or 1) * int(bits) // 8 for count, bits in _GLOBAL_LOAD.findall(ptx))
    copied = (int(size, 0) for size in _ASYNC_COPY.findall(ptx))
    return max((*direct, *copied), default=0)


def read_resources(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of stack and local memory per thread, of a cubin's one function."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        report = subprocess.run(
            [str(tool), "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    found = _RESOURCES.search(report)
    if found is None:
        raise RuntimeError(f"cuobjdump reported no resources: {report[:400]}")
    return int(found.group(1)), int(found.group(2)) + int(found.group(3))


_PTX_TYPE = {"i32": "b32", "i64": "b64", "fp32": "b32"}


def expected_parameters(variant: Variant) -> tuple[str, ...]:
    """PTX parameter types that `pack_arguments` fills for a variant, by size: pointers and 64-bit numbers b64."""
    declared = (_PTX_TYPE.get(kind, "b64") for _, kind in variant.signature)
    return (*declared, *("b64" for _ in range(TRAILING_POINTERS)))


Progress = Callable[[Variant, int], None]


def compile_all(
    variants: dict[int, tuple[Variant, ...]], progress: Progress | None = None
) -> tuple[CompiledKernel, ...]:
    """Compile variants by compute capability, one after the other; `progress` hears of each before it starts."""
    compiled = []
    for sm, chosen in variants.items():
        for variant in chosen:
            if progress is not None:
                progress(variant, sm)
            compiled.append(compile_variant(variant, sm))
    return tuple(compiled)
