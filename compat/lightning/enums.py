"""Lightning's enumerations, whose members equal their text in any case, and a trainer's state made of them."""

from __future__ import annotations

from enum import Enum

from ...trainer import state

__all__ = [
    "GradClipAlgorithmType",
    "Interval",
    "LightningEnum",
    "RestartStage",
    "RunningStage",
    "TrainerFn",
    "TrainerState",
    "TrainerStatus",
    "WriteInterval",
]


class LightningEnum(str, Enum):  # noqa: UP042  # StrEnum's members would differ in `__eq__` and `__hash__` only
    """Text with a fixed set of values; compared without regard to case, with the value and with the name."""

    # `in` and `str` of text would be the value's; Loopwright's messages and dictionaries need just that.
    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]

    @classmethod
    def from_str(cls, value: str, source: str = "key") -> LightningEnum | None:
        """Return the member of this text, None if there is none.

        Args:
            value: The text.
            source: Where to look: "key" for names, "value" for values, "any" for both.
        """
        for member in cls:
            texts = {"key": (member.name,), "value": (member.value,)}.get(source, (member.name, member.value))
            if value.lower().replace("-", "_") in {text.lower().replace("-", "_") for text in texts}:
                return member
        return None

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Enum):
            other = other.value
        return isinstance(other, str) and self.value.lower() == other.lower()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.value.lower())


class TrainerFn(LightningEnum):
    """The verbs."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(LightningEnum):
    """The stage of a run."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether it is validation, test or the sanity check."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str | None:
        """Beginning of the name of its loader hook; None in the sanity check, which has none of its own."""
        if self is RunningStage.SANITY_CHECKING:
            return None
        return "val" if self is RunningStage.VALIDATING else str(self.value)


class TrainerStatus(LightningEnum):
    """The status of a run."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether it ended."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class GradClipAlgorithmType(LightningEnum):
    """How gradients are clipped."""

    VALUE = "value"
    NORM = "norm"

    @staticmethod
    def supported_type(val: str) -> bool:
        """Return whether a text names an algorithm."""
        return any(member == val for member in GradClipAlgorithmType)

    @staticmethod
    def supported_types() -> list[str]:
        """Return the names of the algorithms."""
        return [str(member.value) for member in GradClipAlgorithmType]


class Interval(LightningEnum):
    """When a Timer looks at the clock."""

    step = "step"
    epoch = "epoch"


class WriteInterval(LightningEnum):
    """When a BasePredictionWriter writes."""

    BATCH = "batch"
    EPOCH = "epoch"
    BATCH_AND_EPOCH = "batch_and_epoch"

    @property
    def on_batch(self) -> bool:
        """Whether after each batch."""
        return self in (WriteInterval.BATCH, WriteInterval.BATCH_AND_EPOCH)

    @property
    def on_epoch(self) -> bool:
        """Whether at the end."""
        return self in (WriteInterval.EPOCH, WriteInterval.BATCH_AND_EPOCH)


class RestartStage(LightningEnum):
    """The stage of a loop when it was saved."""

    NONE = "none"
    RESTARTED_ON_EPOCH_START = "restarted_on_epoch_start"
    RESTARTED_ON_EPOCH_END = "restarted_on_epoch_end"
    RESTARTED_MID_EPOCH = "restarted_mid_epoch"
    RESTARTED_MID_EVALUATION = "restarted_mid_evaluation"
    RESUMED_ON_EPOCH_END = "resumed_on_epoch_end"


class TrainerState(state.TrainerState):
    """`trainer.state` with Lightning's members in place of texts; texts can be assigned."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> object:  # of slots, methods and properties
        value = super().__getattribute__(name)
        kind = _KINDS.get(name)
        return value if kind is None or value is None else kind(value)

    @property
    def finished(self) -> bool:
        """Whether the last verb succeeded."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether the last verb ended."""
        return TrainerStatus(self.status).stopped


_KINDS: dict[str, type[LightningEnum]] = {"fn": TrainerFn, "stage": RunningStage, "status": TrainerStatus}
