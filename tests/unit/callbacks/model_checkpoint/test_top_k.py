from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopwright.callbacks.model_checkpoint.top_k import TopK

# Few distinct values, so that ties are common.
SCORES = st.lists(st.sampled_from([0.0, -0.0, 0.5, 1.0, 2.0, -1.0, math.nan, math.inf, -math.inf]), max_size=14)


def reference(scores: list[float], k: int, mode: str) -> list[int]:
    """The indices that stay: by score, then by age; NaN is the worst."""
    worst = math.inf if mode == "min" else -math.inf
    cleaned = [worst if math.isnan(score) else score for score in scores]
    sign = 1 if mode == "min" else -1
    order = sorted(range(len(scores)), key=lambda index: (sign * cleaned[index], index))
    return order if k == -1 else order[:k]


@given(scores=SCORES, k=st.integers(-1, 4), mode=st.sampled_from(["min", "max"]))
def test_keeps_what_sorting_all_scores_would_keep(scores: list[float], k: int, mode: str) -> None:
    top_k = TopK(k, mode)
    on_disk: set[str] = set()
    for index, score in enumerate(scores):
        if top_k.accepts(score):
            on_disk.add(str(index))
            on_disk.discard(top_k.add(str(index), score))
        kept = reference(scores[: index + 1], k, mode)
        assert on_disk == set(top_k.scores) == {str(i) for i in kept}
        assert top_k.best_path == (str(kept[0]) if kept else "")
        assert top_k.kth_path == (str(kept[-1]) if 0 < k == len(kept) else "")


def test_negative_zero_equals_zero() -> None:
    top_k = TopK(1, "min")
    top_k.add("a", 0.0)
    assert not top_k.accepts(-0.0)


def test_a_path_has_one_entry() -> None:
    top_k = TopK(2, "min")
    top_k.add("a", 1.0)
    top_k.add("b", 2.0)
    assert top_k.add("a", 0.5) == ""
    assert top_k.scores == {"a": 0.5, "b": 2.0}


@pytest.mark.parametrize(("mode", "worst"), [("min", math.inf), ("max", -math.inf)])
def test_nan_is_the_worst(mode: str, worst: float) -> None:
    top_k = TopK(1, mode)
    top_k.add("a", math.nan)
    assert top_k.scores == {"a": worst}
    assert top_k.accepts(123.0)
    assert not top_k.accepts(math.nan)
