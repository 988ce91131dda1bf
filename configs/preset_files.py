"""The presets that ship with the package: a model config and deployment defaults each."""

from __future__ import annotations

from importlib.resources import files

from engram_trt.configs.deployment import DeploymentConfig
from engram_trt.configs.errors import ConfigError, DeploymentError
from engram_trt.configs.json_file import parse_json_object
from engram_trt.configs.model import ModelConfig

PRESETS = ("tiny", "released")


def _text(folder: str, name: str) -> bytes:
    if name.partition(".")[0] not in PRESETS:
        raise ConfigError("preset", found=name, expected=" or ".join(PRESETS), remedy="Name a preset of the package.")
    return files("engram_trt.configs").joinpath(folder, name).read_bytes()


def model_preset(name: str) -> ModelConfig:
    """The model of preset `tiny` or `released`; `ConfigError` for another name."""
    where = f"models/{name}.json"
    return ModelConfig.from_dict(parse_json_object(_text("models", f"{name}.json"), where, ConfigError), where=where)


def deployment_preset(name: str) -> DeploymentConfig:
    """The deployment defaults of preset `tiny` or `released`; `ConfigError` for another name."""
    import tomllib

    where = f"presets/{name}.toml"
    try:
        document = tomllib.loads(_text("presets", f"{name}.toml").decode("utf-8"))
    except ValueError as cause:
        raise DeploymentError(where, found=str(cause), expected="TOML", remedy="Reinstall.") from None
    return DeploymentConfig.from_dict(document, where=where)
