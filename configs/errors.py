"""User errors: a wrong input, told so that the reader knows where, what was found, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Callable


class UserError(Exception):
    """A wrong input or environment. The command line prints it without a trace and exits with 2.

    Args:
        where: file, key, tensor or argument at fault.
        found: what is there.
        expected: what should be there.
        remedy: the next step for the reader.
    """

    exit_code = 2

    def __init__(self, where: str, *, found: str, expected: str, remedy: str) -> None:
        self.where = where
        self.found = found
        self.expected = expected
        self.remedy = remedy
        super().__init__(f"{where}: found {found}; expected {expected}. {remedy}")

    def __reduce__(self) -> tuple[Callable[..., UserError], tuple[object, ...]]:
        """An error comes out of a worker process as it was raised there."""
        return _revived, (type(self), self.args, self.__dict__)


def _revived(kind: type[UserError], arguments: tuple[object, ...], values: dict[str, object]) -> UserError:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(values)
    return error


class ConfigError(UserError):
    """A key of `config.json` is unknown, missing or inconsistent with another."""


class DeploymentError(UserError):
    """A deployment file, or a limit it sets, cannot be used."""


class CheckpointError(UserError):
    """A checkpoint is incomplete, damaged, hostile, or not the one asked for."""


class TokenizerError(UserError):
    """The tokenizer or its compressed token map is not the model's."""


class ArtifactError(UserError):
    """An exported artefact is damaged, incomplete, of another version or of another model."""


class RequestError(UserError):
    """A prompt, id, length, row or position lies outside what the engine accepts."""


class BackendError(UserError):
    """A back end is not installed or cannot run this artefact."""


class KernelError(UserError):
    """A kernel cannot take these tensors on this device; said before anything is launched."""


class ClusterError(UserError):
    """Processes that were started together do not fit each other, or cannot meet."""


class PeerError(UserError):
    """Another process of the chain is lost or has stopped; the command line exits with 3, not 2.

    Args:
        kind: `lost` or `failed`: a process to look into; `refused` or `interrupted`: rank 0 has told the user why;
            `terminated`: all were told to stop.
        where, found, expected, remedy: as for every user error.
    """

    def __init__(self, where: str, *, kind: str, found: str, expected: str, remedy: str) -> None:
        self.kind = kind
        self.exit_code = {"refused": 2, "interrupted": 130, "terminated": 143}.get(kind, 3)
        super().__init__(where, found=found, expected=expected, remedy=remedy)
