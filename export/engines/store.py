"""The `engines` folder of an artefact: finished builds, the one under way, and the lock between two at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engram_trt.configs.errors import UserError
from engram_trt.export.atomic_folder import sync_folder, write_atomically
from engram_trt.export.engines.kernels import RECORDS_SUFFIX, find_kernel
from engram_trt.export.exclusive import exclusively
from engram_trt.plugins.trt_kernels import KernelRecord
from engram_trt.runtime.stage_runners.tensorrt_manifest import (
    ENGINES_FOLDER,
    KERNELS_FOLDER,
    LOGS_FOLDER,
    PLANS_FOLDER,
    EnginesManifest,
    PlanRecord,
    find_builds,
    plan_from_json,
    plan_to_json,
)


@contextmanager
def engines_lock(root: Path) -> Iterator[None]:
    """Hold the artefact's `engines` folder for one build.

    Raises:
        ArtifactError: another build is at work there, or the disk refuses.
    """
    folder = root / ENGINES_FOLDER
    with exclusively(folder / ".lock", place=folder, work="build", folders=[folder]):
        yield


class EngineStore:
    """One build's place, and what can be taken over from the others.

    Args:
        root: of the artefact.
        key: of the build.
    """

    def __init__(self, root: Path, key: str) -> None:
        self.root, self.key = root, key
        self.folder = root / ENGINES_FOLDER / key
        self._work = root / ENGINES_FOLDER / f".work-{key}"

    def finished(self) -> EnginesManifest | None:
        """The build, if it is there and whole."""
        try:
            manifest = EnginesManifest.read(self.folder)
            for plan in manifest.plans:
                plan.file.locate(self.folder)
            for kernel in manifest.kernels:
                if (self.folder / KERNELS_FOLDER / kernel.file_name).stat().st_size != kernel.num_bytes:
                    return None
            for stage in manifest.stages:
                if stage.small_weights is not None:
                    stage.small_weights.verify(self.folder)
        except (UserError, OSError):
            return None
        return manifest if manifest.key == self.key else None

    @contextmanager
    def work(self) -> Iterator[Path]:
        """The folder that becomes the build when the block ends well; what was finished in it is kept otherwise."""
        for name in (PLANS_FOLDER, KERNELS_FOLDER, LOGS_FOLDER):
            (self._work / name).mkdir(parents=True, exist_ok=True)
        yield self._work
        for name in ("jobs", "lib"):
            shutil.rmtree(self._work / name, ignore_errors=True)
        for path in (self._work / PLANS_FOLDER).glob("*.json"):
            path.unlink()
        sync_folder(self._work)
        aside = self.folder.with_name(f".replaced-{self.key}")
        if self.folder.exists():
            shutil.rmtree(aside, ignore_errors=True)
            self.folder.rename(aside)
        self._work.rename(self.folder)
        sync_folder(self.folder.parent)
        shutil.rmtree(aside, ignore_errors=True)

    # --- plans --------------------------------------------------------------------------------------------

    def find_plan(self, key: str) -> PlanRecord | None:
        """A plan that is done: by a stopped run of this build, or by another build, from where it is copied."""
        record = self._finished_here(key)
        if record is not None:
            return record
        for folder in find_builds(self.root):
            try:
                found = next((plan for plan in EnginesManifest.read(folder).plans if plan.key == key), None)
                if found is not None:
                    shutil.copyfile(found.file.verify(folder), self._work / found.file.path)
                    _copy_if_there(folder / LOGS_FOLDER / f"{key}.log", self._work / LOGS_FOLDER)
                    return found
            except UserError:
                continue
        return None

    def add_plan(self, record: PlanRecord) -> None:
        """Note a plan whose file is written, so that a stopped build need not make it again."""
        path = self._work / PLANS_FOLDER / f"{record.key}.json"
        write_atomically(path, json.dumps(plan_to_json(record)).encode())

    def _finished_here(self, key: str) -> PlanRecord | None:
        try:
            record = plan_from_json(json.loads((self._work / PLANS_FOLDER / f"{key}.json").read_bytes()))
            record.file.verify(self._work)
        except (OSError, ValueError, KeyError, TypeError, UserError):
            return None
        return record

    # --- kernels ------------------------------------------------------------------------------------------

    def find_kernel(self, key: str) -> KernelRecord | None:
        """A kernel that is compiled: here, or in another build, from where it is copied."""
        here = self._work / KERNELS_FOLDER
        record = find_kernel(here, key)
        if record is not None:
            return record
        for folder in find_builds(self.root):
            other = folder / KERNELS_FOLDER
            record = find_kernel(other, key)
            if record is not None:
                shutil.copyfile(other / record.file_name, here / record.file_name)
                shutil.copyfile(other / f"{key}{RECORDS_SUFFIX}", here / f"{key}{RECORDS_SUFFIX}")
                return record
        return None


def plan_file(work: Path, key: str) -> Path:
    """Where the plan of a key lies."""
    return work / PLANS_FOLDER / f"{key}.plan"


def _copy_if_there(source: Path, folder: Path) -> None:
    if source.is_file():
        shutil.copyfile(source, folder / source.name)
