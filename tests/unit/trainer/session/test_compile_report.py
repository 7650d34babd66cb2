"""What a run says of its compilation; graphs run as they are, so that compiling takes no compiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from toys import Net, adam, assert_same, loader, net, quiet

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # torch's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo's own
]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs graphs as they are, and counts its calls by eager and compiled steps."""

    def __init__(self) -> None:
        self.count = self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.count += 1

        def run(*arguments: Any) -> Any:
            self.runs += 1
            return graph.forward(*arguments)

        return run


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name.endswith("compile_report")]


def test_the_first_step_and_later_ones_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loopwright")
    trainer = quiet(max_epochs=2, compile={"backend": Graphs()})
    trainer.fit(net(Net, adam), loader(16))
    texts = said(caplog)
    assert len(texts) == 1
    assert texts[0].startswith("torch.compile: 1 graph in ")
    assert "the first compiled step took" in texts[0]
    assert "later ones" in texts[0]
    assert "compile={'compare': 5}" in texts[0]
    assert trainer.timeline.report().compiled == texts[0]
    assert texts[0] in str(trainer.timeline.report())


def test_a_fit_that_compiles_nothing_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loopwright")
    trainer, module = quiet(max_epochs=1, compile={"backend": Graphs()}), net(Net, adam)
    for epochs in (1, 2):
        trainer.max_epochs = epochs
        trainer.fit(module, loader(16))
    assert len(said(caplog)) == 1
    assert trainer.timeline.compiled is None


def test_steps_to_compare_run_uncompiled_and_the_gain_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "loopwright")
    expected, module, graphs = net(Net, adam), net(Net, adam), Graphs()
    quiet(max_epochs=2, accumulate_grad_batches=2).fit(expected, loader(40))
    trainer = quiet(max_epochs=2, accumulate_grad_batches=2, compile={"backend": graphs, "compare": 3})
    trainer.fit(module, loader(40))
    assert_same(module, expected)
    assert (graphs.count, graphs.runs) == (1, 40 - 3 * 2)
    (text,) = said(caplog)
    assert "uncompiled" in text
    assert "times as fast" in text
    assert "compare" not in text
    # The first step, and the one that compiles, are not in the phases of the others.
    assert [one.step for one in trainer.timeline.records][:4] == [1, 2, 4, 5]


def test_what_is_to_compare_is_over_with_the_run(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(max_steps=1, compile={"backend": Graphs(), "compare": 3})
    trainer.fit(net(Net, adam), loader(16))
    assert torch._dynamo.eval_frame._stance.stance == "default"
    graphs = Graphs()
    torch.compile(lambda x: x + 1, backend=graphs)(torch.ones(1))
    assert graphs.runs == 1
    trainer.validate(Validated(), loader(4), verbose=False)


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))


def test_recompilations_are_counted_with_their_cause(caplog: pytest.LogCaptureFixture) -> None:
    class Lengths(Net):
        def loss(self, batch: Any) -> Any:
            return self.net(batch).square().mean()

    def fit(**options: Any) -> tuple[str, int]:
        caplog.clear()
        torch._dynamo.reset()
        graphs = Graphs()
        batches = [torch.ones(length, 4) for length in (3, 5, 2, 7, 4, 9)]
        quiet(max_epochs=1, compile={"backend": graphs, **options}).fit(net(Lengths, adam), batches)
        return said(caplog)[-1], graphs.count

    caplog.set_level(logging.INFO, "loopwright")
    text, count = fit()
    assert count == 2
    assert "2 graphs" in text
    assert "1 of them recompilations; the last because:" in text
    assert "size mismatch" in text
    text, count = fit(dynamic_dims=0)
    assert count == 1
    assert "recompilations" not in text
