"""The README is true: its commands exist, its files exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from engram_trt.runtime.cli import build_parser, commands

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks() -> list[str]:
    return re.findall(r"```(?:\w*)\n(.*?)```", README, flags=re.DOTALL)


def test_commands_parse() -> None:
    """Every `engram-trt ...` line is accepted by the parser as it stands."""
    parser = build_parser(commands())
    lines = [
        line.split("#")[0].strip() for block in blocks() for line in block.splitlines() if line.startswith("engram-trt")
    ]
    assert len(lines) >= 5
    for line in lines:
        words = re.findall(r'"[^"]*"|\S+', line)
        arguments = parser.parse_args([word.strip('"') for word in words[1:]])
        assert arguments.verb == words[1]


def test_the_deployment_file_is_one() -> None:
    import tomllib

    from engram_trt.configs.deployment import DeploymentConfig

    (example,) = re.findall(r"```toml\n(.*?)```", README, flags=re.DOTALL)
    deployment = DeploymentConfig.from_dict(tomllib.loads(example))
    assert (deployment.limits.max_rollback, deployment.engram.residency) == (8, "mmap")


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"make ([a-z-]+)", README))
    assert targets >= {"demo", "test", "test-large"}
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.parametrize(
    "name",
    sorted(set(re.findall(r"`((?:configs|export|plugins|runtime|tests)/[\w./]*)`", README))),
)
def test_named_files_exist(name: str) -> None:
    assert (ROOT / name).exists()


def test_python_example_runs_as_written(tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(tiny_artifact.parent)
    names: dict[str, object] = {}
    exec(example.replace('"artefact"', f'"{tiny_artifact.name}"'), names)
    assert names["session"].length(0) == len(names["tokenizer"].encode("The river"))  # type: ignore[attr-defined]


def test_a_newcomer_sees_both_commands_first() -> None:
    first_screen = "\n".join(README.splitlines()[:24])
    assert "make demo" in first_screen
    assert "make test" in first_screen
