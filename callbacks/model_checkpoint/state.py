"""The state of a ModelCheckpoint: kept files, scores and pending removals."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .top_k import TopK

if TYPE_CHECKING:
    from ...protocols import StateDict


@dataclass(slots=True)
class CheckpointState:
    """Kept files, their scores, and what is still to be done.

    Attributes:
        top_k: The best ones and their scores; empty without monitor.
        num_newest: Number of the newest files to keep, whatever their scores.
        newest: The newest files, at most `num_newest`, in the order in which they were written.
        best_path: The best one, without monitor the newest; empty if there is none.
        best_score: Score of the best one.
        last_path: Path of `last`; empty if there is none.
        last_step: `global_step` of `last`, -1 if there is none.
        current_score: Score of the latest checkpoint that was considered.
        triggered_step: `global_step` at which a save was last due; at most one per step.
        is_waiting: Whether a save waits for its metric.
        pending_removals: Replaced files, removed as soon as their successor is written.
    """

    top_k: TopK
    num_newest: int = 0
    newest: list[str] = field(default_factory=list)
    best_path: str = ""
    best_score: float | None = None
    last_path: str = ""
    last_step: int = -1
    current_score: float | None = None
    triggered_step: int = 0
    is_waiting: bool = False
    pending_removals: list[str] = field(default_factory=list)

    def copy(self) -> CheckpointState:
        """Return an independent copy."""
        top_k = replace(self.top_k, scores=dict(self.top_k.scores))
        return replace(self, top_k=top_k, newest=list(self.newest), pending_removals=list(self.pending_removals))

    def enter(self, path: str, score: float | None, *, is_best: bool) -> None:
        """Record a file that is about to be written, and those that it replaces.

        Args:
            path: The file.
            score: Its score; None without monitor.
            is_best: Whether it is one of the best.
        """
        before = self._listed()
        if self.num_newest:
            self.newest = [*(one for one in self.newest if one != path), path][-self.num_newest :]
        if score is None:
            self.best_path = path
        elif is_best:
            self.top_k.add(path, score)
            self.best_path = self.top_k.best_path
            self.best_score = self.top_k.scores[self.best_path]
        self.pending_removals += dict.fromkeys(one for one in before if not self.holds(one))

    def replaced_by(self, score: float | None, *, is_best: bool) -> list[str]:
        """Return the files that go for a new one with this score."""
        after = self.copy()
        after.enter("", score, is_best=is_best)
        return [one for one in self._listed() if one not in after._listed()]

    def _listed(self) -> list[str]:
        return [*self.newest, *self.top_k.scores]

    def enter_last(self, path: str, step: int) -> None:
        """Record the path and step of `last`; a previous one with another name is removed."""
        if self.last_path and self.last_path != path:
            self.pending_removals.append(self.last_path)
        self.last_path, self.last_step = path, step

    def holds(self, path: str) -> bool:
        """Whether the file is one of those that are kept."""
        return path in self._listed() or path in (self.best_path, self.last_path)

    def forget(self, missing: Collection[str]) -> None:
        """Forget files that do not exist anymore."""
        self.top_k.scores = {path: score for path, score in self.top_k.scores.items() if path not in missing}
        self.newest = [path for path in self.newest if path not in missing]
        if self.last_path in missing:
            self.last_path, self.last_step = "", -1
        if self.best_path in missing:
            self.best_path = self.top_k.best_path or next(reversed(self.newest), "")
            self.best_score = self.top_k.scores.get(self.best_path)

    def files(self) -> set[str]:
        """Return the paths of all files that are kept."""
        return {one for one in (*self._listed(), self.best_path, self.last_path) if one}

    def keep_best_path_only(self) -> None:
        """Forget all files but the best path: they are in a directory that this run must not clean."""
        self.top_k.scores, self.newest = {}, []
        self.last_path, self.last_step, self.best_score, self.pending_removals = "", -1, None, []

    def state_dict(self) -> StateDict:
        """Return plain values and tensors, under the field's names where it has one."""
        kth_path = self.top_k.kth_path
        return {
            "best_model_score": _optional_tensor(self.best_score),
            "best_model_path": self.best_path,
            "current_score": _optional_tensor(self.current_score),
            "best_k_models": {path: score_tensor(score) for path, score in self.top_k.scores.items()},
            "kth_best_model_path": kth_path,
            "kth_value": score_tensor(self.top_k.scores[kth_path] if kth_path else self.top_k.worst_score),
            "newest": list(self.newest),
            "last_model_path": self.last_path,
            "last_step": self.last_step,
            "triggered_step": self.triggered_step,
            "is_waiting": self.is_waiting,
            "pending_removals": list(self.pending_removals),
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned."""
        self.best_path = state["best_model_path"]
        self.best_score = _optional_float(state.get("best_model_score"))
        self.current_score = _optional_float(state.get("current_score"))
        self.top_k.scores = {path: float(score) for path, score in state.get("best_k_models", {}).items()}
        # Before `newest` was saved, the only file without a score was the best.
        only = [self.best_path] if self.best_path and self.best_score is None else []
        self.newest = list(state.get("newest", only))[-self.num_newest :] if self.num_newest else []
        self.last_path = state.get("last_model_path", "")
        self.last_step = int(state.get("last_step", -1))
        self.triggered_step = int(state.get("triggered_step", 0))
        self.is_waiting = bool(state.get("is_waiting", False))
        self.pending_removals = list(state.get("pending_removals", []))


def score_tensor(score: float) -> Tensor:
    """Return a 0-dim CPU tensor: float32 if that is exact, else float64."""
    single = torch.tensor(score, dtype=torch.float32)
    return single if single.item() == score else torch.tensor(score, dtype=torch.float64)


def _optional_tensor(score: float | None) -> Tensor | None:
    return None if score is None else score_tensor(score)


def _optional_float(score: Tensor | float | None) -> float | None:
    return None if score is None else float(score)
