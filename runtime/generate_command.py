"""`engram-trt generate`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from engram_trt.configs.errors import RequestError
from engram_trt.runtime.cli import Command
from engram_trt.runtime.verification import add_verify_option

if TYPE_CHECKING:
    from engram_trt.configs.deployment import DeploymentConfig
    from engram_trt.runtime.artifact import Artifact
    from engram_trt.runtime.engine import Engine
    from engram_trt.runtime.generation import Generation, GenerationConfig
    from engram_trt.runtime.tokenizer import Tokenizer

MAX_PROMPT_BYTES = 64 << 20


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("artifact", metavar="DIR", type=Path, help="an exported artefact")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="raw text; no chat template is applied")
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="raw UTF-8 text")
    prompt.add_argument("--ids", metavar="FILE", type=Path, help="token ids, separated by white space or commas")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=128, help="new tokens (default 128)")
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top-p", metavar="P", type=float, default=1.0, help="default 1: keep all tokens")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument("--ignore-eos", action="store_true", help="do not stop at the end of the sequence")
    parser.add_argument("--no-bos", action="store_true", help="put no BOS id in front of a text")
    parser.add_argument("--parse-special", action="store_true", help="read names of special tokens as tokens")
    parser.add_argument("--backend", metavar="NAME", default="onnxruntime", help="onnxruntime (default) or torch")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="where the checkpoint is now")
    parser.add_argument("--deployment", metavar="FILE", type=Path, help="on which devices stages run")
    add_verify_option(parser)
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of text")


def _run(arguments: argparse.Namespace) -> int:
    from engram_trt.runtime.artifact import Artifact
    from engram_trt.runtime.distributed.ranks import launched_rank

    rank = launched_rank()
    if rank is not None:
        from engram_trt.runtime.distributed.launch import LaunchRequest, run_ranked

        request = LaunchRequest(
            command="engram-trt generate",
            artifact=arguments.artifact,
            checkpoint=arguments.checkpoint,
            backend=arguments.backend,
            deployment=arguments.deployment,
            verify=arguments.verify,
        )

        def first_rank(artifact: Artifact, engine: Engine, _: object) -> int:
            config, tokenizer = _generation_config(arguments), artifact.tokenizer()
            return _answer(arguments, tokenizer, _prompt_ids(arguments, tokenizer), config, engine)

        return run_ranked(rank, request, first_rank)
    config = _generation_config(arguments)
    artifact = Artifact.open(arguments.artifact, arguments.checkpoint, arguments.verify)
    deployment, tokenizer = deployment_of(artifact, arguments.deployment), artifact.tokenizer()
    prompt = _prompt_ids(arguments, tokenizer)
    with artifact.engine(arguments.backend, deployment=deployment) as engine:
        return _answer(arguments, tokenizer, prompt, config, engine)


def _generation_config(arguments: argparse.Namespace) -> GenerationConfig:
    from engram_trt.runtime.generation import GenerationConfig
    from engram_trt.runtime.sampling import SamplingConfig

    sampling = SamplingConfig(temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed)
    return GenerationConfig(max_tokens=arguments.max_tokens, ignore_eos=arguments.ignore_eos, sampling=sampling)


def _answer(
    arguments: argparse.Namespace, tokenizer: Tokenizer, prompt: list[int], config: GenerationConfig, engine: Engine
) -> int:
    from engram_trt.runtime.generation import Generation
    from engram_trt.runtime.session import Session

    generation = Generation(Session(engine), prompt, config)
    (_print_json if arguments.json else _print_text)(generation, tokenizer)
    return 0


def deployment_of(artifact: Artifact, path: Path | None) -> DeploymentConfig | None:
    """What a file says about where an artefact runs; None without a file."""
    from engram_trt.configs.deployment import DeploymentConfig

    return None if path is None else DeploymentConfig.for_artifact(path, artifact.manifest.deployment)


def _prompt_ids(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    if arguments.ids is not None:
        return parse_ids(_read(arguments.ids), str(arguments.ids))
    text = arguments.prompt if arguments.prompt is not None else _read(arguments.prompt_file)
    return tokenizer.encode(text, bos=not arguments.no_bos, parse_special=arguments.parse_special)


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_PROMPT_BYTES:
            raise RequestError(
                str(path), found="a very large file", expected="a prompt", remedy="Give at most 64 MiB of text."
            )
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            str(path), found=f"{error}", expected="a readable UTF-8 file", remedy="Check the path and the encoding."
        ) from None


def parse_ids(text: str, where: str) -> list[int]:
    """Integers separated by white space or commas; RequestError for anything else, with its place."""
    ids = []
    for place, word in enumerate(text.replace(",", " ").split()):
        digits = word.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()) or len(digits) > 18:
            raise RequestError(
                f"{where}, entry {place}",
                found=repr(word[:40]),
                expected="an integer",
                remedy="Separate token ids by white space or commas.",
            )
        ids.append(int(word))
    return ids


def _print_json(generation: Generation, tokenizer: Tokenizer) -> None:
    tokens = list(generation)
    document = {
        "token_ids": tokens,
        "text": tokenizer.decode(tokens),
        "finish_reason": generation.finish_reason,
    }
    print(json.dumps(document))


def _print_text(generation: Generation, tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    for token in generation:
        sys.stdout.write(stream.push(token))
        sys.stdout.flush()
    print(stream.finish())


COMMAND = Command(
    summary="continue a prompt",
    description=(
        "Continue a prompt with an exported model. The text is taken as it is, with the BOS id in front; chat\n"
        "templates are not supported. With --json, standard output holds exactly one line:\n"
        '{"token_ids": [new ids], "text": ..., "finish_reason": "eos" or "length"}.'
    ),
    examples="""
    engram-trt generate artefact --prompt "Once upon a time" --max-tokens 32
    engram-trt generate artefact --ids prompt.txt --temperature 1 --top-p 0.95 --seed 7 --json
    """,
    configure=_configure,
    run=_run,
)
