"""What the hardware can do at most: given, probed, or assumed; floors of time follow from these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

GPU, CPU = "gpu", "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates of one kind of device.

    Attributes:
        memory: bytes a second read from the device's memory.
        operations: multiplications and additions a second in the stages' dtype.
        link: bytes a second between two devices.
        disk_reads: random page reads a second from the disk with the checkpoint.
        sources: rate -> `assumed`, `given` or `probed`.
    """

    memory: int
    operations: int
    link: int
    disk_reads: int
    sources: Mapping[str, str]

    def with_rates(self, source: str, rates: Mapping[str, int | None]) -> Ceilings:
        """The same with some rates replaced; None leaves one as it is."""
        known = {name: rate for name, rate in rates.items() if rate is not None}
        return replace(self, **known, sources={**self.sources, **dict.fromkeys(known, source)})

    def to_json(self) -> dict[str, object]:
        """Plain integers and sources."""
        return {
            "memory_bytes_per_s": self.memory,
            "operations_per_s": self.operations,
            "link_bytes_per_s": self.link,
            "disk_reads_per_s": self.disk_reads,
            "sources": dict(self.sources),
        }


_RATES = ("memory", "operations", "link", "disk_reads")

ASSUMED: Mapping[str, Ceilings] = {
    # An H200: a device copy was seen to move 4.3 TB/s and bf16 products 770 TFLOP/s; PCIe 5 x16 between devices.
    GPU: Ceilings(
        memory=4_300_000_000_000,
        operations=770_000_000_000_000,
        link=50_000_000_000,
        disk_reads=100_000,
        sources=dict.fromkeys(_RATES, "assumed"),
    ),
    # Two cores of a virtual machine.
    CPU: Ceilings(
        memory=10_000_000_000,
        operations=100_000_000_000,
        link=1_000_000_000,
        disk_reads=10_000,
        sources=dict.fromkeys(_RATES, "assumed"),
    ),
}
