"""Whether a plan fits, and the smallest change that makes it fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, log2
from typing import Any

from engram_trt.configs.engram_placement import EngramPlacement
from engram_trt.configs.errors import DeploymentError
from engram_trt.configs.layers import free_boundaries
from engram_trt.export.planning.plan import Plan, PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """One thing there is not enough of."""

    what: str
    needed: int
    available: int

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "needed_bytes": self.needed, "available_bytes": self.available}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A change of one setting after which everything fits."""

    setting: str
    now: str
    then: str

    def to_json(self) -> dict[str, str]:
        return {"setting": self.setting, "now": self.now, "then": self.then}

    def __str__(self) -> str:
        return f"{self.setting}: {self.now} -> {self.then}"


def shortfalls(plan: Plan) -> list[Shortfall]:
    """What there is not enough of, out of what the request says there is."""
    request, found = plan.request, []

    def compare(what: str, needed: int, available: int | None) -> None:
        if available is not None and needed > available:
            found.append(Shortfall(what=what, needed=needed, available=available))

    if request.gpu:
        for device in plan.devices:
            compare(f"memory of {device.name}", device.peak_bytes, request.gpu_memory)
    export = plan.export()
    compare("host memory of the run", plan.host()["total"], request.host_memory)
    compare("host memory of the export", export["memory_bytes"], request.host_memory)
    compare("disk of the export", export["disk_bytes"], request.disk)
    return found


def options(plan: Plan) -> list[Option]:
    """Changes that make everything fit, the smallest first.

    Residency never changes a result, so it comes first. Then what needs the fewest halvings of step tokens (which
    slows the prefill), batch and context (which takes something from the users), one alone or several together;
    of one alone the largest value that fits. More devices come behind
    these, and last the experts on all devices: that takes an export of its own, and three exchanges a layer.
    """
    request = plan.request
    limits = request.deployment.limits
    found: list[tuple[int, Option]] = []
    fetched = _with_residency(request, "mmap")
    if fetched is not None and not shortfalls(Plan.of(fetched, plan.stages)):
        found.append((0, Option(setting="engram.residency", now=request.deployment.engram.residency, then="mmap")))
    now = (limits.max_step_tokens, limits.max_batch, limits.max_context)
    halvings = _fewest_halvings(plan, now)
    if halvings is not None:
        then = tuple(value >> times for value, times in zip(now, halvings, strict=True))
        changed = [number for number, times in enumerate(halvings) if times]
        if len(changed) == 1:
            then = _largest(plan, now, changed[0])
        names, before, after = (", ".join(str(part[n]) for n in changed) for part in (_SETTINGS, now, then))
        found.append((sum(halvings), Option(setting=names, now=before, then=after)))
    for number, setting in enumerate(_SETTINGS):
        then = _largest(plan, now, number)
        option = Option(setting=setting, now=str(now[number]), then=str(then[number]))
        if then != now and option not in [known for _, known in found]:
            found.append((ceil(log2(now[number] / then[number])), option))
    ordered = [option for _, option in sorted(found, key=lambda pair: pair[0])]
    return [*ordered, *_more_devices(plan), *_spread_experts(plan)]


_SETTINGS = ("step tokens", "batch", "context")
Values = tuple[int, ...]


def _changed(request: PlanRequest, values: Values) -> PlanRequest:
    step, batch, context = values
    return request.with_limits(max_step_tokens=min(step, context), max_batch=batch, max_context=context)


def _fewest_halvings(plan: Plan, now: Values) -> Values | None:
    """How often to halve each setting: the fewest in all, step tokens rather than batch rather than context."""
    most = tuple(value.bit_length() - 1 for value in now)
    if not _fits(plan, _changed(plan.request, (1, 1, 1))):
        return None
    for count in range(1, sum(most) + 1):
        for context in range(min(count, most[2]) + 1):
            for batch in range(min(count - context, most[1]) + 1):
                times = (count - context - batch, batch, context)
                if times[0] > most[0]:
                    continue
                values = tuple(value >> shift for value, shift in zip(now, times, strict=True))
                if _fits(plan, _changed(plan.request, values)):
                    return times
    return None


def _more_devices(plan: Plan) -> Iterator[Option]:
    request = plan.request
    for count in range(request.num_gpus + 1, _most_devices(request) + 1) if request.gpu else ():
        if not shortfalls(Plan.of(replace(request, num_gpus=count), plan.stages)):
            yield Option(setting="devices", now=f"{request.num_gpus}", then=f"{count}")
            return


def verdict(plan: Plan) -> dict[str, Any]:
    """Fits or not, what is short, and what would help; `fits` is None where no capacity is known."""
    request = plan.request
    capacities = (request.gpu_memory if request.gpu else None, request.host_memory, request.disk)
    found = shortfalls(plan)
    known = any(capacity is not None for capacity in capacities)
    helpful = options(plan) if found else []
    return {
        "fits": not found if known else None,
        "shortfalls": [item.to_json() for item in found],
        "smallest_change": helpful[0].to_json() if helpful else None,
        "options": [option.to_json() for option in helpful],
        "needed_per_device_bytes": max(device.peak_bytes for device in plan.devices),
        "largest_number_of_devices": _most_devices(request) if request.gpu else 1,
    }


def _most_devices(request: PlanRequest) -> int:
    """Pieces of the chain: groups of layers that share caches, and the head."""
    return len(free_boundaries(request.facts.config)) + 1


def _fits(plan: Plan, request: PlanRequest) -> bool:
    try:
        return not shortfalls(plan.with_smaller(request))
    except DeploymentError:
        return False


def _largest(plan: Plan, now: Values, number: int) -> Values:
    """`now` with one setting at the largest smaller value that fits; `now` itself if not even 1 does."""

    def values(value: int) -> Values:
        return tuple(value if position == number else old for position, old in enumerate(now))

    if now[number] <= 1 or not _fits(plan, _changed(plan.request, values(1))):
        return now
    fitting, failing = 1, now[number]
    while failing - fitting > 1:
        middle = (fitting + failing) // 2
        if _fits(plan, _changed(plan.request, values(middle))):
            fitting = middle
        else:
            failing = middle
    return values(fitting)


def _spread_experts(plan: Plan) -> Iterator[Option]:
    request, devices = plan.request, tuple(device.name for device in plan.devices)
    if len(devices) < 2 or request.deployment.experts:
        return
    deployment = replace(request.deployment, devices=devices, stages=(), experts=devices)
    if not shortfalls(Plan.of(replace(request, deployment=deployment))):
        yield Option(setting="experts", now="with their layers", then=f"shared by {len(devices)} devices")


def _with_residency(request: PlanRequest, residency: str) -> PlanRequest | None:
    """The same with every table fetched; None where that is so already."""
    engram = request.deployment.engram
    placement: EngramPlacement = replace(engram, residency=residency, layers=())
    if not request.facts.config.has_engram or placement == engram:
        return None
    return replace(request, deployment=replace(request.deployment, engram=placement))
