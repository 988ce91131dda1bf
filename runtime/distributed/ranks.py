"""Which of several processes this one is: what `torchrun`, or another launcher of its kind, says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from engram_trt.configs.errors import ClusterError

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of a launch.

    Args:
        number: 0 has the user; ranks follow each other along the chain.
        world_size: processes.
        local_number: of this process on its host.
        local_world_size: processes on this host.
        address: host and port where the ranks meet.
    """

    number: int
    world_size: int
    local_number: int
    local_world_size: int
    address: str

    @property
    def is_one_host(self) -> bool:
        return self.local_world_size == self.world_size


def launched_rank(environment: Mapping[str, str] | None = None) -> Rank | None:
    """This process's place; None for a process that runs alone.

    Args:
        environment: variables of the launcher; the process's own if None.

    Raises:
        ClusterError: some are missing or no numbers.
    """
    variables = os.environ if environment is None else environment
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    missing = [name for name in VARIABLES if not variables.get(name)]
    if missing and variables["WORLD_SIZE"] != "1":
        raise _unusable(f"no {' and no '.join(missing)}")
    number, world_size = _number(variables, "RANK", "0"), _number(variables, "WORLD_SIZE", "1")
    if not 0 <= number < world_size:
        raise _unusable(f"RANK={number} and WORLD_SIZE={world_size}")
    if world_size == 1:
        return None
    return Rank(
        number=number,
        world_size=world_size,
        local_number=_number(variables, "LOCAL_RANK", str(number)),
        local_world_size=_number(variables, "LOCAL_WORLD_SIZE", str(world_size)),
        address=f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}",
    )


def _number(variables: Mapping[str, str], name: str, default: str) -> int:
    text = variables.get(name, default)
    if not (text.isascii() and text.isdigit()):
        raise _unusable(f"{name}={text!r}")
    return int(text)


def _unusable(found: str) -> ClusterError:
    return ClusterError(
        "environment",
        found=found,
        expected=f"{', '.join(VARIABLES)} as a launcher sets them",
        remedy="Start with `torchrun --nproc-per-node N`, or unset RANK and WORLD_SIZE.",
    )
