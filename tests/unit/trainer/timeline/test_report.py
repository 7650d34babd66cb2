from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from toys import Net, loader, net, quiet

import loopwright as lw
from loopwright.callbacks import LambdaCallback
from loopwright.trainer.timeline.report import TimelineReport, make_report
from loopwright.trainer.timeline.roofline import DevicePeak, OperationCounts
from loopwright.trainer.timeline.timeline import STEP_PHASES, WHOLE_PHASES, StepRecord, Timeline


def measured(*, counted: OperationCounts | None = None, idle: float | None = None, **milliseconds: float) -> Timeline:
    """Return a timeline of ten equal steps, and of what is not in steps once."""
    timeline = Timeline()
    steps = {phase: taken / 1e3 for phase, taken in milliseconds.items() if phase in STEP_PHASES}
    for number in range(1, 11):
        timeline._keep(StepRecord(number, 0.0, steps))
    timeline._measured_ns = round(sum(steps.values()) * 10 * 1e9)
    for phase in WHOLE_PHASES:
        timeline._spent[phase] = round(milliseconds.get(phase.replace(" ", "_"), 0.0) * 1e6)
    timeline.operations = counted
    if idle is not None:
        timeline._num_asked, timeline._num_idle = 10, round(10 * idle)
    return timeline


def counts(compute_s: float, memory_s: float) -> OperationCounts:
    return OperationCounts({"forward": 100}, {"forward": 50}, compute_s, memory_s, DevicePeak(1.0, 1.0))


CASES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"data": 8, "forward": 1, "backward": 2}, "data", "data", "num_workers"),
    ({"transfer": 8, "forward": 1, "backward": 2}, "transfer", "data", "pin_memory"),
    ({"data": 1, "forward": 3, "backward": 6}, "backward", "compute", "bf16-mixed"),
    ({"forward": 3, "backward": 6, "counted": counts(1, 2)}, "backward", "memory", "wait for memory"),
    ({"forward": 3, "backward": 6, "counted": counts(2, 1)}, "backward", "compute", "torch.compile"),
    ({"forward": 3, "backward": 3, "optimizer": 9}, "optimizer", "memory", "fused=True"),
    ({"forward": 1, "backward": 1, "communication": 5}, "communication", "communication", "ddp_comm_hook"),
    ({"forward": 1, "hooks": 5}, "hooks", "overhead", "log less often"),
    ({"forward": 3, "backward": 6, "idle": 0.9}, "backward", "overhead", "torch.compile"),
    ({"forward": 3, "backward": 6, "idle": 0.1}, "backward", "compute", "bf16-mixed"),
    ({"forward": 1, "validation": 90}, "validation", "compute", "validate less often"),
    ({"forward": 1, "checkpoint": 90}, "checkpoint", "compute", "save less often"),
]


@pytest.mark.parametrize(("case", "bottleneck", "bound", "advice"), CASES)
def test_bottleneck_bound_and_advice(case: dict[str, Any], bottleneck: str, bound: str, advice: str) -> None:
    report = make_report(measured(**case))
    assert (report.bottleneck, report.bound) == (bottleneck, bound)
    assert advice in report.advice[0]


def test_fractions_are_of_the_total_and_advice_is_given_from_a_tenth_on() -> None:
    report = make_report(measured(data=2, forward=3, backward=4.5, clip=0.5, validation=25))
    assert report.total_s == pytest.approx(0.125)
    assert report.fractions["validation"] == pytest.approx(0.2)
    assert report.fractions["data"] == pytest.approx(0.16)
    assert sum(report.fractions.values()) == pytest.approx(1)
    assert len(report.advice) == 3  # compute, validation, data; clipping is below


def test_the_text_has_a_bar_for_each_phase_the_largest_first() -> None:
    lines = str(make_report(measured(data=1, forward=3, backward=6, counted=counts(2, 1), idle=0.2))).splitlines()
    assert lines[0].endswith("10 of them measured (device time)")
    assert [line.split()[0] for line in lines[1:4]] == ["backward", "forward", "data"]
    assert lines[1].count("#") == 18
    assert "60.0%" in lines[1]
    assert lines[4] == "Bottleneck: backward (60.0%). Bound by: compute."
    assert "20%" in lines[5]
    assert lines[6] == "Floating-point operations per byte: 2."


def test_plain_values_go_through_json() -> None:
    report = make_report(measured(data=1, forward=3))
    content = json.loads(json.dumps(report.as_dict()))
    assert content.pop("fractions") == pytest.approx(report.fractions)
    content.update(advice=tuple(content["advice"]), waited_for=tuple(content["waited_for"]))
    assert TimelineReport(**content) == report


def test_nothing_measured_is_said() -> None:
    report = make_report(Timeline())
    assert "nothing was measured" in str(report)
    assert report.advice == ()


def test_a_report_may_be_asked_for_during_the_fit() -> None:
    texts: list[str] = []
    callback = LambdaCallback(on_train_epoch_end=lambda trainer, module: texts.append(str(trainer.timeline.report())))
    trainer = quiet(max_epochs=2, callbacks=callback)
    trainer.timeline.every = 1
    trainer.fit(net(), loader(20))
    assert "9 of them measured" in texts[0]
    assert "19 of them measured" in texts[1]


def test_a_slow_loader_binds_a_real_fit() -> None:
    now_ns = [0]

    def clock() -> int:
        now_ns[0] += 1000
        return now_ns[0]

    class Slow:
        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Any:
            for batch in loader(16):
                now_ns[0] += 10_000_000
                yield batch

    trainer = quiet(max_epochs=1)
    trainer.timeline._clock = clock
    trainer.fit(net(), Slow())
    assert trainer.timeline.report().bound == "data"


class Large(Net):
    """Either large matrix products or long element-wise chains."""

    def __init__(self, is_matrix: bool) -> None:
        super().__init__()
        self.is_matrix = is_matrix
        self.weight = torch.nn.Parameter(torch.ones(256, 256) if is_matrix else torch.ones(400_000))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.is_matrix:
            return (self.weight @ self.weight @ self.weight).mean()
        return (self.weight * 2 + 1).sin().mul(3).mean()


@pytest.mark.parametrize(("is_matrix", "bound"), [(True, "compute"), (False, "memory")])
def test_counted_operations_tell_compute_from_memory(is_matrix: bool, bound: str) -> None:
    trainer = quiet(max_epochs=1)
    trainer.timeline.every, trainer.timeline.counts_operations = 1, True
    trainer.fit(net(Large, is_matrix), loader(12))
    counted = trainer.timeline.operations
    assert counted is not None
    assert counted.is_memory_bound == (bound == "memory")
    if is_matrix:
        assert counted.operations["forward"] == 2 * 2 * 256**3
        assert counted.operations["backward"] == 4 * 2 * 256**3
    assert trainer.timeline.num_measured == 4  # of six: the first, and the one that was counted
    assert trainer.timeline.report().intensity == pytest.approx(counted.intensity)


def test_a_fused_optimizer_is_recommended_with_what_it_took_here() -> None:
    class Wide(Net):
        def __init__(self) -> None:
            super().__init__(torch.optim.AdamW)
            self.more = torch.nn.ParameterList(torch.ones(64, 64) for _ in range(40))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + sum(one.sum() for one in self.more)

    def advised(make: Any) -> tuple[str, ...]:
        module = net(Wide)
        module.make_optimizer = make
        trainer = quiet(max_epochs=1)
        trainer.timeline.every = 1
        trainer.fit(module, loader(12))
        # However fast this machine is: the optimizer takes half of a step.
        timeline = trainer.timeline
        timeline._sums = {**dict.fromkeys(STEP_PHASES, 0.0), "optimizer": 1.0, "forward": 1.0}
        drawn = torch.get_rng_state()
        before = [one.clone() for one in module.parameters()]
        advice = timeline.report().advice
        assert torch.equal(drawn, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        return advice

    with_number = [text for text in advised(torch.optim.AdamW) if "AdamW(fused=True)" in text]
    assert "takes 50% of a step" in with_number[0]
    assert "lw.optim.adamw chooses, took" in with_number[0]
    fused = [text for text in advised(lw.optim.adamw) if "takes 50% of a step" in text]
    assert "fused" not in fused[0]
    assert "accumulate_grad_batches" in fused[0]
