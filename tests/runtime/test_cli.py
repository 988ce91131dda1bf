"""The command line: verbs from entry points, exit codes, no traces for user errors, quick start."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from engram_trt.configs.errors import RequestError
from engram_trt.runtime import cli
from engram_trt.runtime.cli import Command


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--number", type=int, default=3)


def _run(arguments: argparse.Namespace) -> int:
    print("ran", arguments.number)
    return 1 if arguments.number == 1 else 0


def _refuse(arguments: argparse.Namespace) -> int:
    raise RequestError("--number", found="7", expected="3", remedy="Give 3.")


def _interrupt(arguments: argparse.Namespace) -> int:
    raise KeyboardInterrupt


def _break(arguments: argparse.Namespace) -> int:
    raise ZeroDivisionError("a bug")


VERBS = {
    "work": Command(summary="work", configure=_configure, run=_run, examples="engram-trt work --number 3"),
    "refuse": Command(summary="refuse", configure=_configure, run=_refuse),
    "interrupt": Command(summary="interrupt", configure=_configure, run=_interrupt),
    "break": Command(summary="break", configure=_configure, run=_break),
}


@pytest.fixture(autouse=True)
def _fixed_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "commands", lambda: VERBS)


def test_a_verb_runs_and_its_code_is_returned(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["work"]) == 0
    assert cli.main(["work", "--number", "1"]) == 1
    assert capsys.readouterr().out == "ran 3\nran 1\n"


def test_a_user_error_is_one_message_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["refuse"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "engram-trt refuse: --number: found 7; expected 3. Give 3.\n"


def test_an_interrupt_is_code_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["interrupt"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_bug_keeps_its_trace() -> None:
    with pytest.raises(ZeroDivisionError):
        cli.main(["break"])


@pytest.mark.parametrize("arguments", [[], ["no-such-verb"], ["work", "--number", "x"], ["work", "--num", "3"]])
def test_a_wrong_call_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == 2
    assert "usage:" in capsys.readouterr().err


def test_help_lists_verbs_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    assert "refuse" in capsys.readouterr().out
    assert cli.main(["work", "--help"]) == 0
    assert "examples:\n  engram-trt work --number 3" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("engram-trt ")


def test_verbs_come_from_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    entry = EntryPoint(name="synth", value="engram_trt.export.synth_command:COMMAND", group=cli.COMMAND_GROUP)
    assert cli.commands([entry])["synth"].summary
    assert "synth" in cli.commands()


def run_command(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-c", code] if code else [str(Path(sys.executable).with_name("engram-trt")), *arguments]
    return subprocess.run(call, capture_output=True, text=True, timeout=120, check=False)


def test_the_installed_command_starts() -> None:
    done = run_command("--help")
    assert done.returncode == 0
    assert "synth" in done.stdout
    assert run_command("synth", "--out").returncode == 2


def test_help_imports_no_toolchain() -> None:
    code = (
        "import sys; from engram_trt.runtime.cli import main; main(['--help'])\n"
        "heavy = {'torch', 'onnx', 'onnxruntime', 'tensorrt', 'triton', 'numpy', 'sympy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = run_command(code=code)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_causes_no_trace() -> None:
    code = (
        "import sys\n"
        "from engram_trt.runtime import cli\n"
        "def run(arguments):\n"
        "    for line in range(200000):\n"
        "        print('line', line)\n"
        "    return 0\n"
        "verb = cli.Command(summary='s', configure=lambda parser: None, run=run)\n"
        "cli.commands = lambda: {'flood': verb}\n"
        "sys.exit(cli.main(['flood']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "line 0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141
