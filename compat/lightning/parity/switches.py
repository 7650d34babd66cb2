"""The table of parity: what Lightning does, what Loopwright does, and what a switch puts in place when a run begins.

Reading it imports neither torch nor the functions that it names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

from ....errors import ConfigError, nearest
from ..imports.finder import LightningFinder

__all__ = ["SWITCHES", "Switch", "active", "as_text", "choose", "find_replacement", "functions"]


class Switch(NamedTuple):
    """A difference that can be switched off.

    Attributes:
        name: What the user calls it.
        lightning: What Lightning does, and a program with the switch.
        loopwright: What Loopwright does, and a program without it.
        changes: Where it hooks in: the moment, a colon, and a function of this package as `file.function`. Moments are
            "arguments" (those of a Trainer or Fabric, before it is made), "behavior" (returns what a Trainer does at
            the seams, given what it would do), "trainer" (its first verb begins in this process), "hooks" (a verb's
            hooks are in order), "run" (its run is made), "step" (the functions of fit's step are bound), "before" (the
            state that the Trainer's last fit left is read), "evaluation" (that of another verb begins), "bar" (the
            bar's metrics are read), "estimate" (so are estimated_stepping_batches), "fabric" (a Fabric was made),
            "sampler" (it gets a loader to distribute), "loader" (that loader is prepared), and "method" (a method of a
            Fabric module is bound).
        names: Names of Lightning that mean another class: `Name=file.Class`.
    """

    name: str
    lightning: str
    loopwright: str
    changes: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


SWITCHES = (
    Switch(
        "random_numbers",
        "Validation, test and a second fit draw from the generators of training, which continue from there. A resumed "
        "run starts with the generators of its process.",
        "Training continues as if nothing had been drawn in between, and a resumed run continues exactly.",
        ("trainer:random_numbers.share_generators",),
    ),
    Switch(
        "reading",
        "A loader is iterated once per epoch; batches are fetched one by one as training needs them, from the "
        "generators of training. A run that is resumed in mid-epoch restarts the loader.",
        "A loader's generator is drawn from as in a plain loop, iterable data and workers have separate random "
        "numbers, and a resumed run continues with the next batch.",
        (
            "trainer:reading.fetch_batches",
            "trainer:evaluations.begin_before_hooks",
            "behavior:evaluations.begin_in_loops",
            "loader:workers.read_as_it_is",
        ),
    ),
    Switch(
        "means",
        "The values of an epoch are added one by one, in float32. The value of a step is that of its last micro-batch.",
        "Sums are in float64. The value of a step is the weighted mean over its micro-batches.",
        ("trainer:means.add_one_by_one",),
    ),
    Switch(
        "short_windows",
        "The last accumulation window of an epoch is divided by accumulate_grad_batches, however short it is.",
        "It is divided by its own number of micro-batches.",
        ("run:windows.divide_short_windows",),
    ),
    Switch(
        "losses_of_none",
        "When training_step returns None, the optimizer still steps, and the step counts.",
        "The micro-batch is skipped, and a window without any loss makes no step.",
        ("step:windows.step_without_loss",),
    ),
    Switch(
        "divided_outputs",
        'outputs["loss"] in on_train_batch_end is divided by accumulate_grad_batches.',
        "It is what training_step returned.",
        ("step:windows.divide_outputs",),
    ),
    Switch(
        "closures",
        "training_step and backward run inside of optimizer.step, as its closure. on_before_zero_grad follows "
        "training_step. Each evaluation of LBFGS is logged.",
        "They run before optimizer.step, which gets a closure only where it needs one, and logs its first evaluation.",
        ("step:closure.step_with_closures",),
    ),
    Switch(
        "loop_progress",
        "Loops count what is ready, started, processed and completed, in total and in the current epoch: at each hook, "
        "in checkpoints, and in a resumed run. A fit whose limits are reached has no on_train_start.",
        "The counts of fit_loop are computed from trainer.progress where they are read. Each fit has on_train_start.",
        ("trainer:progress.begin_counts", "run:progress.follow_hooks", "step:progress.count_zero_grad"),
    ),
    Switch(
        "hook_order",
        "At the end of a batch and of a validation, ModelCheckpoint and EarlyStopping act before the module's hook. "
        "A checkpoint that is saved within a hook is taken there.",
        "They act after it. A checkpoint is taken after all hooks of the event.",
        ("hooks:hook_order.save_within_events",),
    ),
    Switch(
        "within_windows",
        "A validation that is due after a micro-batch follows it, and should_stop, save_checkpoint and a resumed run "
        "take effect there, also where the accumulation window is not complete.",
        "They follow the window. A checkpoint within one is refused.",
        ("behavior:within_windows.end_windows_early", "step:within_windows.act_within_windows"),
    ),
    Switch(
        "schedule_steps",
        "The frequency of a schedule with interval='step' counts the batches of its epoch. Plateau schedules among "
        "them are stepped after a validation that is due.",
        "It counts optimizer steps since training began.",
        ("step:schedules.count_batches",),
    ),
    Switch(
        "plateaus",
        "A plateau schedule is stepped after the checkpoints of the epoch, at each epoch, with the latest value.",
        "It is stepped before them, once for each new value.",
        ("step:schedules.save_before_plateaus",),
    ),
    Switch(
        "last_checkpoints",
        "ModelCheckpoint(save_last=True) writes `last` at the end of an epoch or a validation only where it keeps "
        "another file there; with save_top_k=0 once, at the end of training.",
        "It writes `last` whenever a checkpoint is due.",
        ("run:checkpoints.save_last_with_best",),
    ),
    Switch(
        "optimizer_steps",
        "global_step and max_steps count the steps of each optimizer in manual optimization; logs count batches.",
        "They count training steps.",
        ("trainer:counts.count_optimizers", "step:counts.count_own_steps"),
    ),
    Switch(
        "fit_start",
        "In on_fit_start of a resumed fit, counts and states of optimizers are those before the checkpoint is read.",
        "They are those of the checkpoint.",
        ("behavior:resuming.start_before_restoring",),
    ),
    Switch(
        "frozen_parameters",
        "A resumed fit trains the parameters that the program has not frozen, in the modes that it has set.",
        "Which parameters are frozen and which modules are in eval mode is as in the checkpoint.",
        ("behavior:resuming.leave_frozen_as_it_is",),
    ),
    Switch(
        "resumed_logs",
        "A resumed fit has a new version of its logs, and files beside them. Existing rows are kept.",
        "It continues in the logs of the run, without the rows after the checkpoint.",
        ("behavior:resuming.begin_new_logs",),
    ),
    Switch(
        "resumed_events",
        "The sanity check of a resumed fit sees the epoch at whose end the checkpoint was taken. Callbacks that came "
        "after the one that saved are not called for its event.",
        "It sees the epoch that training continues with, and the event in which the checkpoint was taken is finished.",
        ("run:resuming.begin_with_saved_epoch", "step:resuming.leave_events_unfinished"),
    ),
    Switch(
        "cut_epochs",
        "should_stop within an epoch triggers one more validation. An epoch that is cut short by it, or by max_steps, "
        "counts as one. One that on_train_batch_start ends with -1 is not validated.",
        "Training stops after the step. An epoch that was cut short can be continued, and does not count.",
        ("behavior:counts.count_cut_epochs",),
    ),
    Switch(
        "samplers",
        "Loaders without a sampler for ranks get a DistributedSampler, which shuffles training data and repeats "
        "samples; each rank reads all of an IterableDataset. predict returns the rank's own batches.",
        "The batches of each loader are distributed over ranks as they are. predict returns all of them, in order.",
        ("run:ranks.insert_samplers", "behavior:ranks.keep_own_predictions", "sampler:ranks.insert_sampler"),
    ),
    Switch(
        "rank_masks",
        "All ranks draw the same dropout masks. After seed_everything, each verb on a strategy for several processes "
        "begins with its seed.",
        "Ranks draw different random numbers, which continue from those of the program.",
        ("trainer:ranks.draw_alike", "run:ranks.seed_again"),
    ),
    Switch(
        "rank_metrics",
        "The epoch values of a rank are its own, where they were logged without sync_dist=True; loggers get rank 0's. "
        "With it they are a mean of the ranks' sums over a mean of the ranks' weights.",
        "They are those of all ranks.",
        ("run:rank_logs.keep_own_values",),
    ),
    Switch(
        "rank_decisions",
        "Each rank judges the values that it has: EarlyStopping stops where any rank stops, ModelCheckpoint saves "
        "where all ranks would, and each rank steps its plateau schedules by its own value.",
        "All ranks judge the same values.",
        ("run:ranks.decide_on_own_values",),
    ),
    Switch(
        "sync_dist_steps",
        "self.log(..., sync_dist=True) in a step reduces over ranks at each step, as an unweighted mean.",
        "Values are reduced at log intervals, by their weights.",
        ("step:rank_logs.reduce_each_step",),
    ),
    Switch(
        "rank_loggers",
        "Loggers that the program defines are called on every rank.",
        "They are called on rank 0.",
        ("run:rank_logs.tell_all_ranks",),
    ),
    Switch(
        "bfloat16_on_cpu",
        "precision='16-mixed' is bf16-mixed on the CPU.",
        "It is float16 with a loss scale.",
        ("arguments:process.use_bfloat16",),
    ),
    Switch(
        "autocast_cache",
        "In a Trainer's 16-mixed and bf16-mixed, a weight is cast at each use: gradients of several uses in a step add "
        "up in float32.",
        "It is cast once per step: they add up in 16 bits.",
        ("trainer:process.cast_at_each_use",),
    ),
    Switch(
        "buffers",
        "In 16-true and bf16-true, all floating point buffers are cast.",
        "Those that are not persistent, such as rotary frequencies, keep their dtype.",
        ("trainer:process.cast_all_buffers", "fabric:process.cast_all_buffers"),
    ),
    Switch(
        "metrics_of_verbs",
        "callback_metrics and the bar are empty when a verb begins, also after a resume.",
        "They keep the values of earlier verbs.",
        ("run:logs.forget_metrics", "step:logs.forget_restored_metrics"),
    ),
    Switch(
        "bar_metrics",
        "progress_bar_metrics has the values of the last step.",
        "It has those of the last log interval.",
        ("behavior:logs.show_one_key", "trainer:logs.keep_one_key", "bar:logs.show_latest"),
    ),
    Switch(
        "evaluation_rows",
        "Rows of validate and test stand at the step after the last one that this Trainer has trained.",
        "They stand at the step of the weights.",
        ("evaluation:logs.log_after_training",),
    ),
    Switch(
        "step_values",
        "A row of training has the latest value of each key that was logged in the epoch.",
        "It has the keys that were logged in its step.",
        ("run:logs.keep_step_values",),
    ),
    Switch(
        "evaluation_steps",
        "Values of evaluation steps are logged at each batch; their step counts the batches of each loader.",
        "They are logged at log intervals; their step counts all batches.",
        ("behavior:logs.log_each_evaluation_step",),
    ),
    Switch(
        "equal_scores",
        "Of several checkpoints with the same score, the earliest is replaced by a better one.",
        "The earliest stays.",
        ("run:checkpoints.replace_earliest",),
    ),
    Switch(
        "checkpoint_folders",
        "A ModelCheckpoint without dirpath keeps the folder of its first fit, as relative as the logger's.",
        "It saves in the absolute folder of the logger's present run.",
        ("run:checkpoints.keep_first_folder",),
    ),
    Switch(
        "checkpoint_names",
        "A metric without a format has all its digits in the name of a checkpoint.",
        "It has six digits.",
        ("run:checkpoints.write_all_digits",),
    ),
    Switch(
        "data_modules",
        "A verb without datamodule= calls prepare_data, setup and teardown of the data module of an earlier one.",
        "It calls hooks of its own data module only.",
        ("run:data_modules.call_earlier_data_module",),
    ),
    Switch(
        "learning_rates",
        "LearningRateMonitor logs at the beginning of a batch and puts the rates into callback_metrics.",
        "It logs after the step, to the loggers only.",
        names=("LearningRateMonitor=logs.LearningRateMonitor",),
    ),
    Switch(
        "weight_averaging",
        'WeightAveraging and EMAWeightAveraging average a copy of the module; "state_dict" of a checkpoint is the '
        "average.",
        "Checkpoints have the trained weights, and the average in the callback's state.",
        names=("WeightAveraging=averaging.WeightAveraging", "EMAWeightAveraging=averaging.EMAWeightAveraging"),
    ),
    Switch(
        "swa",
        "StochasticWeightAveraging averages the weights with which each of the last epochs begins. Batch norm is "
        "updated in one more epoch, at whose end the optimizer steps with the gradients of the last batch.",
        "The weights at the end of each of these epochs count. Batch norm is updated in its own pass.",
        names=("StochasticWeightAveraging=averaging.StochasticWeightAveraging",),
    ),
    Switch(
        "pruning",
        "ModelPruning gives pruned parameters the names <name>_orig and <name>_mask, prunes and rewinds before the "
        "epoch's checkpoints, and has no state.",
        "Parameters keep their names. Weights are rewound when the next epoch begins, so that checkpoints are trained.",
        names=("ModelPruning=pruning.ModelPruning",),
    ),
    Switch(
        "second_fits",
        "A second fit of a Trainer begins with new optimizers and schedules.",
        "They continue with the state of those before.",
        ("before:counts.begin_anew",),
    ),
    Switch(
        "kept_callbacks",
        "A callback that is passed to another Trainer continues with its counters, scores and files.",
        "It begins again.",
        ("behavior:counts.keep_callbacks", "run:checkpoints.keep_written_steps"),
    ),
    Switch(
        "due_checkpoints",
        "ModelCheckpoint saves when it is due, with the latest values, however old, unless it has saved at this step.",
        "It waits for values of the step.",
        ("run:checkpoints.save_with_latest_values",),
    ),
    Switch(
        "stopping_checks",
        "EarlyStopping judges the latest value at each check, also one that it has judged before.",
        "It judges each value once.",
        ("run:stopping.judge_at_each_check",),
    ),
    Switch(
        "lr_find",
        "The learning-rate search skips the second rate, and its first smoothed losses are half as high.",
        "It tries each rate, and smooths without bias.",
        ("behavior:search.choose_learning_rates",),
    ),
    Switch(
        "trials",
        "Trials of a search read data as training does, validate, and end with max_epochs; in a fit with a finder, "
        "training reads on where they ended.",
        "They read them as Loopwright does, do not validate, and train for as many steps as they need.",
        ("behavior:search.train_in_trials",),
    ),
    Switch(
        "batch_sizes",
        "A batch-size search ends with the first size that is not below the number of samples, subtracts its margin "
        "whether or not memory was the limit, and in mode 'power' may end above max_val. Training continues with the "
        "random numbers after those of its trials.",
        "It ends with the largest size that was tried, fits, and is within the data and max_val.",
        ("behavior:search.choose_batch_sizes",),
    ),
    Switch(
        "stepping_batches",
        "estimated_stepping_batches assumes the present accumulation, also with a GradientAccumulationScheduler.",
        "It is the number of steps that fit takes.",
        ("estimate:counts.estimate_steps",),
    ),
    Switch(
        "fabric_methods",
        "Methods of a Fabric module other than forward run without autocast on one device.",
        "They run in the requested precision.",
        ("method:process.run_without_autocast",),
    ),
    Switch(
        "fabric_inputs",
        "Inputs of a Fabric module in 16-mixed and bf16-mixed are cast to 16 bits.",
        "They are not cast; autocast applies.",
        ("fabric:process.cast_inputs",),
    ),
    Switch(
        "exit_code",
        "Ctrl-C ends the process with exit code 1.",
        "It raises KeyboardInterrupt: exit code 130.",
        ("behavior:process.exit_on_interrupt",),
    ),
)


def choose(parity: bool | Iterable[str]) -> frozenset[str]:
    """Return the names of the requested switches.

    Args:
        parity: True for all, False for none, or names. A string is a list with commas; "1" is all of them, and "" or
            "0" none.

    Raises:
        ConfigError: A name is unknown.
    """
    everything = frozenset(switch.name for switch in SWITCHES)
    if isinstance(parity, bool):
        return everything if parity else frozenset()
    if isinstance(parity, str):
        if parity.strip() in ("", "0", "1"):
            return everything if parity.strip() == "1" else frozenset()
        parity = [name.strip() for name in parity.split(",")]
    names = frozenset(parity)
    unknown = sorted(names - everything)
    if unknown:
        raise ConfigError(
            f"Expected names of parity switches, got {unknown[0]!r}{nearest(unknown[0], sorted(everything))}.",
            fix=f"choose from {', '.join(sorted(everything))}; see `loopwright run-lightning --parity=list`.",
        )
    return names


def as_text(names: frozenset[str]) -> str:
    """Return the names as the environment variable for child processes has them."""
    return "1" if names == choose(True) else ",".join(sorted(names))


def active() -> frozenset[str]:
    """Return the names of the switches that `install` was called with; none without it."""
    return next((finder.parity for finder in sys.meta_path if isinstance(finder, LightningFinder)), frozenset())


def functions(moment: str) -> Iterator[Any]:  # Any: what a moment takes
    """Yield the functions of active switches that change something at this moment, in the table's order."""
    names = active()
    for switch in SWITCHES if names else ():
        if switch.name in names:
            for change in switch.changes:
                when, _, place = change.partition(":")
                if when == moment:
                    module, _, function = place.partition(".")
                    yield getattr(import_module(f"{__package__}.{module}"), function)


def find_replacement(name: str) -> Any:  # Any: a class
    """Return what a name of Lightning means by an active switch; None where it means what it always does."""
    names = active()
    for switch in SWITCHES if names else ():
        if switch.name in names:
            for entry in switch.names:
                served, _, place = entry.partition("=")
                if served == name:
                    module, _, attribute = place.partition(".")
                    return getattr(import_module(f"{__package__}.{module}"), attribute)
    return None
