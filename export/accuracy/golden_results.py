"""What a comparison found: checks, and what was not compared and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engram_trt.configs.errors import CheckpointError
from engram_trt.export.accuracy.golden_tolerance import Distance, Limit, distance


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One tensor held against its reference.

    Args:
        file: of the reference, relative to the golden folder.
        backend: what computed the other side.
        what: group of tensors the table shows on one line.
        tensor: name within the file.
        limit: what is accepted.
        found: the outcome.
    """

    file: str
    backend: str
    what: str
    tensor: str
    limit: Limit
    found: Distance


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """Something of a file that was not compared.

    Args:
        file: relative to the golden folder.
        backend: the back end it was not compared through.
        what: tensors, shortened; empty for the whole file.
        reason: why.
    """

    file: str
    backend: str
    what: str
    reason: str


@dataclass(slots=True)
class Results:
    """Collects what one job finds; picklable, so that jobs may run in other processes."""

    checks: list[Check] = field(default_factory=list)
    not_run: list[NotRun] = field(default_factory=list)
    inputs: set[str] = field(default_factory=set)
    """Files a comparison was computed from."""

    def extend(self, other: Results) -> None:
        """Add what another job found."""
        self.checks += other.checks
        self.not_run += other.not_run
        self.inputs |= other.inputs


class Vectors:
    """The tensors of one file, and a record of which were used and how.

    Args:
        file: relative to the golden folder.
        tensors: its contents.
        backend: what the tensors are compared with.
        results: receives checks and notes.
    """

    def __init__(self, file: str, tensors: Mapping[str, Tensor], backend: str, results: Results) -> None:
        self.file, self.tensors, self.backend, self.results = file, tensors, backend, results
        self._seen: set[str] = set()
        results.inputs.add(file)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    @property
    def names(self) -> list[str]:
        return sorted(self.tensors)

    def prefixes(self, parts: int = 1) -> list[str]:
        """The first dotted parts of all names that have more, each once, in order."""
        return sorted({".".join(name.split(".")[:parts]) for name in self.tensors if name.count(".") >= parts})

    def input(self, name: str) -> Tensor:
        """A tensor a comparison starts from; CheckpointError if the file lacks it."""
        self._seen.add(name)
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.file}: {name}",
                found="no such tensor",
                expected="what the other tensors of this case were computed from",
                remedy="Copy the folder again.",
            ) from None

    def check(self, name: str, got: Tensor, limit: Limit, what: str = "", want: Tensor | None = None) -> bool:
        """Compare a tensor of the file, if it has it, and say whether it agrees.

        Args:
            name: in the file.
            got: what the back end computed.
            limit: what is accepted.
            what: line of the table; the last part of the name by default.
            want: the part of the tensor to compare; all of it by default.
        """
        if name not in self.tensors:
            return True
        reference = self.tensors[name] if want is None else want
        return self.record(name, distance(got.detach(), reference, limit), limit, what)

    def record(self, name: str, found: Distance, limit: Limit, what: str = "") -> bool:
        """Note an outcome for a tensor of the file."""
        self._seen.add(name)
        self.results.checks.append(
            Check(
                file=self.file,
                backend=self.backend,
                what=what or name.rpartition(".")[2],
                tensor=name,
                limit=limit,
                found=found,
            )
        )
        return found.ok

    def skip(self, names: Iterable[str], reason: str, what: str = "") -> None:
        """Note tensors as not compared; `what` stands for their names in the list."""
        skipped = [name for name in names if name in self.tensors and name not in self._seen]
        self._seen.update(skipped)
        if skipped:
            self.results.not_run.append(
                NotRun(file=self.file, backend=self.backend, what=what or shortened(skipped), reason=reason)
            )

    def finish(self, reason: str = "not known to this version") -> None:
        """Note whatever has been neither used nor compared."""
        self.skip(self.names, reason)


def shortened(names: Iterable[str]) -> str:
    """Names with their numbers taken out, each once: `layers.*.attn_in, logits`."""
    stars = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in names}
    return ", ".join(sorted(stars))


def bits(mask: Tensor) -> Tensor:
    """A stored 0/1 tensor as bool."""
    return mask.to(torch.bool)
