"""What is installed is what is in the repository."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from engram_trt.runtime.cli import COMMAND_GROUP, build_parser, commands

ROOT = Path(__file__).resolve().parents[2]
TOP = ("configs", "export", "plugins", "runtime")


@pytest.fixture(scope="module")
def project() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_declared(project: dict[str, object]) -> None:
    """A folder with an __init__.py that pyproject.toml forgets would be missing from the wheel."""
    declared = set(project["tool"]["setuptools"]["packages"])  # type: ignore[index]
    found = {
        "engram_trt." + ".".join(path.parent.relative_to(ROOT).parts)
        for top in TOP
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert declared == found


def test_a_wheel_holds_every_source_and_data_file(tmp_path: Path) -> None:
    import zipfile

    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {
        f"engram_trt/{path.relative_to(ROOT).as_posix()}"
        for top in TOP
        for path in (ROOT / top).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".md") and "__pycache__" not in path.parts
    }
    assert expected - names == set()


def test_top_level_is_as_agreed() -> None:
    """The given seven, the Makefile, and hidden files."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    top = {name.split("/")[0] for name in listed if not name.startswith(".")}
    assert top == {"Makefile", "README.md", "configs", "export", "plugins", "pyproject.toml", "runtime", "tests"}


def test_verbs_load_and_document_themselves() -> None:
    verbs = commands()
    assert {"bench", "compare", "demo", "export", "generate", "synth"} <= set(verbs)
    assert set(verbs) == {entry.name for entry in entry_points(group=COMMAND_GROUP)}
    for name, command in verbs.items():
        assert command.summary, name
        assert f"engram-trt {name}" in command.examples, name
    build_parser(verbs)


def test_production_imports_no_toolchain() -> None:
    """Serving needs neither torch nor onnx: importing the whole runtime must not bring them in."""
    modules = [
        "engram_trt." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for top in ("configs", "runtime")
        for path in (ROOT / top).rglob("*.py")
        if path.name != "__init__.py"
    ]
    program = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print([name for name in ('torch', 'onnx', 'onnxscript', 'triton', 'tensorrt', 'polygraphy') "
        "if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
