"""Register all plugins with TensorRT: one call, as often as one likes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engram_trt.configs.errors import ArtifactError, BackendError
from engram_trt.plugins.spec import NAMESPACE
from engram_trt.plugins.tensorrt_api import TensorRT
from engram_trt.plugins.trt_classes import PluginHost, creator_of
from engram_trt.plugins.trt_launch import KernelLauncher
from engram_trt.plugins.trt_plugins import OP_PLUGINS, plugin_abi

_hosts: dict[str, tuple[PluginHost, list[Any]]] = {}
"""Back end -> the host of its plugins and their creators, which TensorRT's registry does not keep alive."""


def register_plugins(api: TensorRT, *, sms: tuple[int, ...] = (), launcher: KernelLauncher | None = None) -> PluginHost:
    """Register a creator per op; later calls only add what they bring.

    Args:
        api: the TensorRT to register with.
        sms: compute capabilities that plans are built for.
        launcher: runs the kernels of plugins in this process, on one of its GPUs.

    Returns:
        what the plugins of this process share.

    Raises:
        BackendError: the registry refuses, or the process already launches on another kind of GPU.
    """
    if api.backend not in _hosts:
        host = PluginHost(api, sms)
        registry = api.module.get_plugin_registry()
        creators = [creator_of(host, op) for op in OP_PLUGINS]
        for creator in creators:
            if not registry.register_creator(creator, NAMESPACE):
                raise BackendError(
                    f"plugin {creator.name}",
                    found="a plugin of that name that is not this package's",
                    expected=f"the namespace {NAMESPACE} to be free",
                    remedy="Do not load another library with these plugins into the process.",
                )
        _hosts[api.backend] = host, creators
    host = _hosts[api.backend][0]
    host.sms = tuple(sorted({*host.sms, *sms}))
    if launcher is not None:
        if host.launcher is not None and host.launcher.sm != launcher.sm:
            raise BackendError(
                "plugins",
                found=f"a GPU of sm_{launcher.sm} in a process that runs on sm_{host.launcher.sm}",
                expected="one kind of GPU per process",
                remedy="Run the other engine in a process of its own.",
            )
        if host.launcher is None:
            host.launcher = launcher
        elif host.launcher is not launcher:
            host.launcher.adopt(launcher)
    return host


def plugin_identities() -> dict[str, dict[str, str]]:
    """Version and ABI of every op, for a manifest."""
    return {op.spec.name: {"version": op.spec.version, "abi": plugin_abi(op.spec.name)} for op in OP_PLUGINS}


def require_same_plugins(where: str, recorded: Mapping[str, Mapping[str, str]]) -> None:
    """Hold the plugins an engine was built with against this code.

    Args:
        where: the engines' place, for the message.
        recorded: op -> version and ABI, as `plugin_identities` gave them.

    Raises:
        ArtifactError: an op is not known any more, or its version or ABI changed.
    """
    known = plugin_identities()
    for op, identity in recorded.items():
        mine = known.get(op)
        if mine is None or dict(identity) != mine:
            found = f"version {identity.get('version')}, ABI {str(identity.get('abi'))[:12]}"
            expected = "no such plugin" if mine is None else f"version {mine['version']}, ABI {mine['abi'][:12]}"
            raise ArtifactError(
                f"{where}: plugin {op}",
                found=f"an engine built for {found}",
                expected=expected,
                remedy="Run `engram-trt build` again with this version of engram-trt.",
            )
