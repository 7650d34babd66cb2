"""Hyperparameters that were OmegaConf containers: a checkpoint has their names and content, with interpolations.

An interpolation of a file may refer to other values. One that calls a resolver (`${oc.env:HOME}`) could call any
function that the program has registered: in its place stands the value that it had when the file was written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from ..protocols import StateDict, Tree
from .to_plain import to_plain

__all__ = ["calls_resolver", "containers_key", "find_containers", "make_container", "restore_containers"]

_ALL = ""  # stands for the hyperparameters themselves
_REFERENCE = re.compile(r"\$\{[^{}:$\\]*\}")


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

    try:
        container = make_container(_without_resolvers(content, resolved))
        OmegaConf.to_container(container, resolve=True)
    except OmegaConfBaseException:
        return make_container(_escaped(resolved))
    return container


def calls_resolver(text: str) -> bool:
    """Return whether a text has an interpolation that is not a mere reference to another value."""
    before = ""
    while text != before:  # references may stand in references
        before, text = text, _REFERENCE.sub("", text)
    return "${" in text


def _without_resolvers(content: Tree, resolved: Tree) -> Tree:
    """Return the content with the resolved values in place of interpolations that call a resolver."""
    if isinstance(content, dict):
        others = resolved if isinstance(resolved, dict) else {}
        return {key: _without_resolvers(value, others.get(key)) for key, value in content.items()}
    if isinstance(content, list):
        entries = resolved if isinstance(resolved, list) and len(resolved) == len(content) else [None] * len(content)
        return [_without_resolvers(value, other) for value, other in zip(content, entries, strict=True)]
    return _escaped(resolved) if isinstance(content, str) and calls_resolver(content) else content


def _escaped(value: Tree) -> Tree:
    """Return values that are no interpolations for OmegaConf."""
    if isinstance(value, dict):
        return {key: _escaped(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_escaped(below) for below in value]
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", value) if isinstance(value, str) else value


def make_container(value: Any) -> Any:  # Any: OmegaConf's overloads of dicts, lists and texts
    """Return a dict or list as an OmegaConf container."""
    from omegaconf import OmegaConf

    return OmegaConf.create(value, flags={"allow_objects": True})
