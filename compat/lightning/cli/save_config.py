"""`SaveConfigCallback`: the configuration of a LightningCLI in the folder of the run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import fsspec

from ....callbacks import Callback
from ....remote.store import make_folder

if TYPE_CHECKING:
    from .argument_parser import LightningArgumentParser

__all__ = ["SaveConfigCallback"]

# Any in this file: trainers and modules of users, and configurations.


class SaveConfigCallback(Callback):
    """Writes the configuration to the trainer's `log_dir` when a run begins, once.

    Args:
        parser: `parser.dump(config)` is the YAML.
        config: The configuration of the subcommand.
        config_filename: Name of the file.
        overwrite: Whether a file of this name is replaced.
        multifile: Accepted: one file is written.
        save_to_log_dir: False writes no file: `save_config` does it.

    Raises:
        ValueError: save_to_log_dir is False, and `save_config` is not overridden.
    """

    def __init__(
        self,
        parser: LightningArgumentParser,
        config: Any,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        multifile: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        super().__init__()
        self.parser = parser
        self.config = config
        self.config_filename = config_filename
        self.overwrite = overwrite
        self.multifile = multifile
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False
        if not save_to_log_dir and type(self).save_config is SaveConfigCallback.save_config:
            raise ValueError(
                f"{type(self).__name__}(save_to_log_dir=False) does nothing: save_config is not overridden. Override "
                "it, or pass save_config_callback=None to LightningCLI."
            )

    def setup(self, trainer: Any, pl_module: object, stage: str) -> None:
        """Write the file, and call `save_config`, on rank zero.

        Raises:
            RuntimeError: The file is there, and must not be replaced.
        """
        if self.already_saved:
            return
        if self.save_to_log_dir:
            self._lw_save(trainer)
        if trainer.is_global_zero:
            self.save_config(trainer, pl_module, stage)
        self.already_saved = True

    def _lw_save(self, trainer: Any) -> None:
        folder = trainer.log_dir
        files, path = fsspec.core.url_to_fs(os.fspath(folder))
        target = f"{path.rstrip('/')}/{self.config_filename}"
        if not self.overwrite:
            is_there = trainer.strategy.broadcast(trainer.is_global_zero and files.isfile(target))
            if is_there:
                raise RuntimeError(
                    f"{type(self).__name__} expected {os.path.join(folder, self.config_filename)} to NOT exist: it is "
                    "the record of an earlier run. Delete it or choose another folder; with "
                    'LightningCLI(save_config_kwargs={"overwrite": True}) it is replaced, with '
                    "save_config_callback=None nothing is saved."
                )
        if trainer.is_global_zero:
            make_folder(files, path)
            with files.open(target, "w", encoding="utf-8") as file:
                file.write(self.parser.dump(self.config, skip_none=False))

    def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Do something else with the configuration, on rank zero. Override it."""
