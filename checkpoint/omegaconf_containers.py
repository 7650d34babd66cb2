"""Hyperparameters that were OmegaConf containers: a checkpoint has their names and content, with interpolations."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from ..protocols import StateDict, Tree
from .to_plain import to_plain

__all__ = ["containers_key", "find_containers", "make_container", "restore_containers"]

_ALL = ""  # stands for the hyperparameters themselves


def containers_key(prefix: str) -> str:
    """Return the key of a checkpoint for the names of hyperparameters that were OmegaConf containers."""
    return f"{prefix}hyper_parameters_omegaconf"


def find_containers(hparams: Mapping[str, object]) -> dict[str, Tree]:
    """Return the values that are OmegaConf containers, as plain values in which interpolations are not resolved.

    The name of the hyperparameters themselves is empty.
    """
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None:
        return {}
    named = {_ALL: hparams} if isinstance(hparams, omegaconf.Container) else dict(hparams)
    found = {name: value for name, value in named.items() if isinstance(value, omegaconf.Container)}
    unresolved = {name: omegaconf.OmegaConf.to_container(value, resolve=False) for name, value in found.items()}
    return {name: to_plain(value)[0] for name, value in unresolved.items()}


def restore_containers(checkpoint: StateDict, prefix: str) -> None:
    """Make OmegaConf containers of the hyperparameters that were such; in place."""
    found = checkpoint.get(containers_key(prefix))
    key = f"{prefix}hyper_parameters"
    if not found or type(checkpoint.get(key)) is not dict:
        return
    if _ALL in found:
        checkpoint[key] = _restored(found[_ALL], checkpoint[key])
        return
    for name, content in found.items():
        if isinstance(checkpoint[key].get(name), dict | list):
            checkpoint[key][name] = _restored(content, checkpoint[key][name])


def _restored(content: Tree, resolved: Tree) -> Tree:
    """Return the container, without interpolations if they led out of it."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    container = make_container(content)
    try:
        OmegaConf.to_container(container, resolve=True)
    except OmegaConfBaseException:
        return make_container(resolved)
    return container


def make_container(value: Any) -> Any:  # Any: OmegaConf's overloads of dicts, lists and texts
    """Return a dict or list as an OmegaConf container."""
    from omegaconf import OmegaConf

    return OmegaConf.create(value, flags={"allow_objects": True})
