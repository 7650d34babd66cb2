"""The k best checkpoints, by score. No file is accessed here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class TopK:
    """Keep the k best (path, score) pairs; of equal scores the earlier one stays.

    A score of NaN counts as the worst there is, and -0.0 equals 0.0.

    Attributes:
        k: Number of checkpoints to keep; -1 all, 0 none.
        mode: "min" if smaller is better, else "max".
        scores: Path -> score, in the order in which they were added.
    """

    k: int
    mode: str
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def worst_score(self) -> float:
        """The score that NaN counts as: inf for "min", -inf for "max"."""
        return math.inf if self.mode == "min" else -math.inf

    @property
    def best_path(self) -> str:
        """Path of the best, the earliest of equals; empty if there is none."""
        return min(self.scores, key=self._cost, default="")

    @property
    def worst_path(self) -> str:
        """Path of the worst, the latest of equals; empty if there is none."""
        return max(reversed(self.scores), key=self._cost, default="")

    @property
    def kth_path(self) -> str:
        """Path that the next better one would replace, the latest of equals; empty unless k are kept."""
        if self.k < 1 or len(self.scores) < self.k:
            return ""
        return self.worst_path

    def cleaned(self, score: float) -> float:
        """Return the score, NaN replaced by the worst there is."""
        return self.worst_score if math.isnan(score) else score

    def accepts(self, score: float) -> bool:
        """Whether a checkpoint with this score would be kept."""
        if self.k == 0:
            return False
        kth_path = self.kth_path
        if not kth_path:
            return True
        score, kth = self.cleaned(score), self.scores[kth_path]
        return score < kth if self.mode == "min" else score > kth

    def add(self, path: str, score: float) -> str:
        """Add an accepted pair and return the path that has to go for it; empty if none.

        A path that is there already is replaced: no path has two entries, and nothing has to go.
        """
        evicted = ""
        if path in self.scores:
            del self.scores[path]
        elif evicted := self.kth_path:
            del self.scores[evicted]
        self.scores[path] = self.cleaned(score)
        return evicted

    def _cost(self, path: str) -> float:
        return self.scores[path] if self.mode == "min" else -self.scores[path]
