"""The command `engram-trt`: finds its verbs through entry points and turns user errors into exit codes.

Exit codes: 0 done; 1 a comparison found a difference; 2 a wrong input or call; 3 another process of the chain was lost;
130 interrupted; 141 the reader of the output left; 143 told to stop, while serving a chain.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points, version

from engram_trt.configs.errors import UserError

COMMAND_GROUP = "engram_trt.commands"
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One verb.

    Attributes:
        summary: one line for the list of verbs.
        description: a paragraph for the verb's own help.
        examples: lines that can be pasted into a shell.
        configure: adds the arguments.
        run: does the work and returns the exit code; heavy imports belong in here.
    """

    summary: str
    description: str = ""
    examples: str = ""
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def commands(entries: Iterable[EntryPoint] | None = None) -> dict[str, Command]:
    """All installed verbs by name; what cannot be imported is a bug of that package and raises."""
    found = entry_points(group=COMMAND_GROUP) if entries is None else entries
    return {entry.name: entry.load() for entry in sorted(found, key=lambda entry: entry.name)}


def build_parser(verbs: dict[str, Command]) -> argparse.ArgumentParser:
    """The whole parser, for the command line and for tests that freeze its options."""
    parser = argparse.ArgumentParser(
        prog="engram-trt",
        description="Export DeepSeek-V4.1-Flash to ONNX and run it.",
        epilog="`engram-trt VERB --help` explains a verb and shows examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('engram-trt')}")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, command in verbs.items():
        subparser = subparsers.add_parser(
            name,
            help=command.summary,
            description=command.description or command.summary,
            epilog=f"examples:\n{_indented(command.examples)}" if command.examples else None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.configure(subparser)
    return parser


def _indented(text: str) -> str:
    return "\n".join(f"  {line.strip()}" for line in text.strip().splitlines())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code; a bug keeps its trace."""
    verbs = commands()
    try:
        arguments = build_parser(verbs).parse_args(argv)
    except SystemExit as stop:
        # argparse has already printed; its code is 0 for --help and 2 for a wrong call.
        return stop.code if isinstance(stop.code, int) else EXIT_USER_ERROR
    try:
        code = verbs[arguments.verb].run(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(f"engram-trt {arguments.verb}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left; keep the interpreter's own flush at exit quiet as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
