"""`SaveConfig`: the configuration of a run, beside its checkpoints and in them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec

from ..callbacks import Callback
from ..errors import ConfigError
from ..files import only_describes, replace_file
from ..messages import warn
from ..remote import is_url
from ..remote.store import make_folder
from ..settings.tree import SettingsTree
from ..yaml_file import parse

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer

_FIX = "pass the configuration with --config."
_INTERPOLATION = re.compile(r"(?<!\\)(?:\\\\)*\$\{")
_KEY = "SaveConfig"
_FIRST_LINE = "# The configuration of a run, written when it began. The next run in this folder replaces it.\n"


class SaveConfig(Callback):
    """Writes the configuration to the run's folder, to the folders of its checkpoints, and into each checkpoint.

    Rank 0 writes when training begins. In each folder, the file contains the configuration of the latest run; a file
    that no run has written is not changed. Nothing is written in a fast_dev_run.

    Args:
        text: The configuration, as YAML.
        filename: Name of the file.
    """

    def __init__(self, text: str, filename: str = "config.yaml") -> None:
        self.text = text if text.startswith(_FIRST_LINE) else _FIRST_LINE + text
        self.filename = filename
        self._lw_is_written = False

    @property
    def state_key(self) -> str:
        """Key of the configuration in checkpoints."""
        return _KEY

    def state_dict(self) -> dict[str, Any]:
        """Return the configuration."""
        return {"config": self.text}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the current configuration: a resumed run may have been started with another one."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: object) -> None:
        """Write the file, once: the checkpoint folders are known now and have been examined."""
        if self._lw_is_written or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        self._lw_is_written = True
        folders = [trainer.log_dir, *(getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks)]
        for folder in dict.fromkeys(str(one) for one in folders if one):
            with only_describes(f"The configuration {folder}/{self.filename}"):
                self._lw_write(folder)

    def _lw_write(self, folder: str) -> None:
        files, path = fsspec.core.url_to_fs(folder)
        make_folder(files, path)
        target = f"{path.rstrip('/')}/{self.filename}"
        if files.exists(target):
            with files.open(target, "rb") as there:
                if there.read(len(_FIRST_LINE)) != _FIRST_LINE.encode():
                    warn(
                        f"{folder}/{self.filename} was not written by a run and is kept; the configuration of this "
                        "run is in its checkpoints"
                    )
                    return
        if not is_url(folder):
            replace_file(target, self.text)
            return
        temporary = f"{path.rstrip('/')}/.{self.filename}.{os.urandom(8).hex()}.tmp"
        with files.open(temporary, "w", encoding="utf-8") as file:
            file.write(self.text)
        files.mv(temporary, target)


def config_of(checkpoint: str) -> str | None:
    """Return the configuration in a checkpoint as YAML; None without one, or if the path is not a local file or folder.

    Nothing of the checkpoint is executed, and its tensors are not read.
    """
    from ..checkpoint.tools.formats import Reading, open_checkpoint

    if "://" not in checkpoint and not Path(checkpoint).exists():
        return None
    tree = open_checkpoint(checkpoint, Reading()).tree
    state = (tree.get("callbacks") or {}).get(_KEY) if isinstance(tree.get("callbacks"), dict) else None
    if state is None:
        return None
    text = state.get("config") if isinstance(state, dict) else None
    if not isinstance(text, str):
        raise ConfigError(
            f"Expected a readable configuration in the checkpoint {checkpoint}, got damaged data.", fix=_FIX
        )
    return text


def written_settings(text: str, name: str) -> SettingsTree:
    """Return the settings in the configuration of a checkpoint, which may be of unknown origin.

    Args:
        text: The configuration.
        name: Name of the configuration in errors.

    Raises:
        ConfigError: It does not have the form that `SaveConfig` writes; it has interpolations, for instance.
    """
    found = parse(text, name)
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"Expected settings by name in {name}, got {type(found).__name__}.", fix=_FIX)
    stack: list[object] = [found]
    for value in stack:  # grows while it is read
        if isinstance(value, dict | list):
            stack.extend(value.values() if isinstance(value, dict) else value)
        elif isinstance(value, str) and _INTERPOLATION.search(value):
            raise ConfigError(f"Expected values in {name}, got the interpolation {value!r}.", fix=_FIX)
    return found
