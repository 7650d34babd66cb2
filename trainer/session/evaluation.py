"""`EvaluationSession`: validate, test and predict, outside of fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ..checkpointing.locate import locate
from ..fit_lines import tell_logs
from ..metrics.log_output import by_loader
from .checks import STAGE_OF, both_given, check_evaluation, module_of_evaluation
from .session import Session

if TYPE_CHECKING:
    from ...data.module import DataModule
    from ...protocols import AnyOutput, Loaders
    from ..loop.eval_loader import EvalLoader
    from ..trainer import Trainer


class EvaluationSession(Session):
    """One validate, test or predict.

    Args:
        trainer: Its arguments apply.
        verb: "validate", "test" or "predict".
        model: The passed module; None for the module of the last run.
        datamodule: The user's data module, or None.
        dataloaders: The loaders that were passed instead.
        ckpt_path: Checkpoint whose weights are evaluated: a path, "best", "last", or None.
        is_trusted: Whether objects that were marked as trusted in the checkpoint are unpickled.

    Attributes:
        data: The loaders, once `start` has opened them.
        evaluated: The checkpoint whose weights are evaluated; None for the module as it is.
    """

    data: EvalLoader
    evaluated: str | None = None

    def __init__(
        self,
        trainer: Trainer,
        verb: str,
        model: nn.Module | None,
        *,
        datamodule: DataModule | None,
        dataloaders: Loaders,
        ckpt_path: str | Path | None,
        is_trusted: bool,
    ) -> None:
        if model is None and datamodule is None and dataloaders is None:
            datamodule = trainer.datamodule
        self.stage = STAGE_OF[verb]
        super().__init__(trainer, verb, datamodule=datamodule, given={self.stage: dataloaders})
        self.model, self.ckpt_path, self.is_trusted = model, ckpt_path, is_trusted

    def start(self) -> None:
        """Attach module and data, load the selected weights, and open the data.

        locate      the checkpoint, which callbacks may know
        begin       see `Session.begin`
        weights     of the checkpoint; records belong to the step at which they were saved
        folders     all ranks know where loggers write
        data        the loaders of the stage
        """
        trainer = self.trainer
        if self.datamodule is not None and self.given[self.stage] is not None:
            raise both_given("dataloaders")
        module = module_of_evaluation(self.verb, self.model, trainer.lightning_module)
        path = locate(trainer, self.ckpt_path, self.verb, has_model=self.model is not None)
        self.begin(module)
        self.evaluated = path
        steps, epochs = self.progress.steps, self.progress.epochs
        if path is not None:
            counts = self.load_weights(path, is_trusted=self.is_trusted).states.get("progress", {})
            # Records belong to the step of the weights, not to the step of an earlier training of this Trainer.
            steps, epochs = counts.get("steps", steps), counts.get("epochs", epochs)
        self.output.records_at = (steps, epochs)
        self.synchronize_folders()
        self.write_hyperparameters()
        self.state.stage = self.verb
        self.strategy.setup(trainer)
        self.data = self.loaders.open_eval(self.stage)

    def evaluate(self, *, keep: bool = False) -> list[list[AnyOutput]]:
        """Run the loop; return what the steps returned, in the order of the data, a list for each loader.

        Args:
            keep: Whether outputs are kept; else the lists are empty.
        """
        run = self.run
        outputs = self.behavior.evaluation_loop(self, self.stage, self.data).run(run, self.data, keep=keep)
        if run.stop_points is not None:
            run.stop_points.begin_phase()
        return self.behavior.in_order(self, outputs) if keep and run.has_ranks else outputs

    def in_order(self, outputs: list[list[AnyOutput]]) -> list[list[AnyOutput]]:
        """Return the outputs of all ranks in the order of the data; on every rank: it communicates."""
        from ..loop import rank_coordination

        return rank_coordination.ordered(self.strategy, outputs, self.data.loaders)

    def results(self) -> list[Mapping[str, float]]:
        """Return the metrics of each loader."""
        if self.data.is_off:
            return []
        return by_loader(self.trainer._lw_results, len(self.data.loaders), self.metrics.loaders_of_keys)

    def check_verb(self) -> None:
        """Refuse a module without the step, and an evaluation without data."""
        check_evaluation(self, self.module)

    def actions(self) -> Mapping[str, Callable[..., object]]:
        """Return what the Trainer does at events: it sends metrics to the loggers."""
        return {
            "on_validation_epoch_end": lambda: self.finish_evaluation("validation"),
            "on_validation_end": self._end_validation,
            "on_test_epoch_end": lambda: self.finish_evaluation("test"),
        }

    def report(self) -> None:
        """Write beside the logs which checkpoint was evaluated, and log where they are."""
        if self.evaluated is not None and self.verb != "predict":
            from ..describe_run import describe_evaluation

            describe_evaluation(self.trainer, self.evaluated)
        if self.verb != "predict":
            tell_logs(self.trainer)
        super().report()

    def _end_validation(self) -> None:
        self.progress.validation_ending = False
