"""What runs compiled in a Trainer: graphs are counted by a backend that compiles nothing."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.utils.data import DataLoader
from toys import ValidatedNet, adam, assert_same, loader, momentum, net, quiet, weights

import loopwright as lw
from loopwright.errors import ConfigError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # torch's own imports
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # dynamo's own
    pytest.mark.filterwarnings("ignore:validation is skipped:UserWarning"),
]

# Any in this file: batches and what torch gives a backend.


class Graphs:
    """A backend that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    def count(self) -> int:
        """Return how many graphs came since the last call."""
        count = len(self.graphs)
        self.graphs.clear()
        return count

    def has(self, name: str) -> bool:
        """Return whether some graph has an operation of this name."""
        return any(name in str(graph.code) for graph in self.graphs)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def graphs() -> Graphs:
    return Graphs()


class Calls(ValidatedNet):
    """Steps call `self.net(x)`, never `self(x)`, and log."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("twice", 2 * loss.detach(), on_step=False, on_epoch=True)
        return loss


class Block(nn.Module):
    def __init__(self, width: int, index: int = 0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.index = index

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(F.relu(self.first(x))) / (self.index + 1)


class Deep(Calls):
    """A network of `depth` equal blocks, each of which knows its number."""

    def __init__(self, depth: int) -> None:
        super().__init__(momentum)
        self.blocks = nn.ModuleList(Block(4, index) for index in range(depth))

    def loss(self, batch: Any) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.net(x), batch[1])


def by_user(module: nn.Module, backend: Graphs) -> tuple[Any, dict[str, Any]]:
    return torch.compile(module, backend=backend), {}


def in_place(module: nn.Module, backend: Graphs) -> tuple[Any, dict[str, Any]]:
    module.compile(backend=backend)
    return module, {}


def by_trainer(module: nn.Module, backend: Graphs) -> tuple[Any, dict[str, Any]]:
    return module, {"compile": {"backend": backend, "fullgraph": True}}


@pytest.mark.parametrize("how", [by_user, in_place, by_trainer])
def test_every_step_runs_compiled_and_computes_the_same(how: Any, graphs: Graphs, tmp_path: Path) -> None:
    def run(module: Any, **arguments: Any) -> tuple[Any, ...]:
        trainer = quiet(max_epochs=2, num_sanity_val_steps=0, log_every_n_steps=1, **arguments)
        counts = []
        trainer.fit(module, loader(), loader(4, seed=1))
        counts.append(graphs.count())
        fitted = dict(trainer.logged_metrics)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        tested = trainer.test(module, loader(4, seed=2), verbose=False)
        counts.append(graphs.count())
        predicted = trainer.predict(module, loader(4, seed=2))
        counts.append(graphs.count())
        assert predicted is not None
        return counts, fitted, tested, torch.cat(predicted), torch.load(tmp_path / "a.ckpt", weights_only=True)

    plain = run(net(Calls, adam))
    module = net(Calls, adam)
    model, arguments = how(module, graphs)
    found = run(model, **arguments)

    assert plain[0] == [0, 0, 0]
    assert found[0] == [2, 1, 1]  # a graph each for training, validation, test and prediction
    assert found[1] == plain[1]
    assert found[2] == plain[2]
    assert torch.equal(found[3], plain[3])
    assert_same(found[4]["state_dict"], plain[4]["state_dict"])
    assert not {"training_step", "validation_step"} & set(vars(module))  # as it was before


def test_a_verb_without_a_module_runs_the_last_one_as_it_was_compiled(graphs: Graphs) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(torch.compile(net(Calls), backend=graphs), loader())
    assert graphs.count() == 1
    trainer.predict(trainer.lightning_module, loader(4))
    assert graphs.count() == 1


def test_the_loss_is_a_part_of_the_graph(graphs: Graphs) -> None:
    module = net(Calls)
    quiet(max_epochs=1, compile={"backend": graphs}).fit(module, loader())
    assert graphs.has("mse_loss")


def test_what_a_step_logs_makes_no_break_in_the_graph_and_is_all_there(graphs: Graphs) -> None:
    class Chatty(Calls):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step >= 2:
                self.log("late", 1.0)
            z = torch.zeros(1, device=self.device, dtype=self.dtype)
            self.log_dict({"index": float(batch_idx), "epoch": self.current_epoch})
            return super().training_step(batch, batch_idx) + z.sum()

        def on_train_epoch_end(self) -> None:
            self.log("at_end", 3.0)

    def logged(**arguments: Any) -> dict[str, float]:
        trainer = quiet(max_epochs=3, log_every_n_steps=1, **arguments)
        trainer.fit(net(Chatty), loader(12))
        return dict(trainer.logged_metrics)

    counters.clear()
    assert logged(compile={"backend": graphs}) == logged()
    assert not counters["graph_break"]
    # The first step, the second (numbers become variables), and the first that logs more: not one for each of 18 steps.
    assert graphs.count() <= 5


@pytest.mark.parametrize("depth", [3, 9])
def test_blocks_share_their_graphs_so_that_depth_costs_nothing(depth: int, graphs: Graphs) -> None:
    expected = net(Deep, depth)
    quiet(max_epochs=2).fit(expected, loader(), loader(4))
    module = net(Deep, depth)
    quiet(max_epochs=2, compile={"backend": graphs, "fullgraph": True}).fit(module, loader(), loader(4))
    assert_same(module, expected)
    # Of `net`, in training and in validation; and of all blocks together: the first one's input needs no gradient, the
    # others' does, and a number that differs from block to block becomes a variable.
    assert graphs.count() <= 7
    assert not any("compiled" in name for one in module.modules() for name in vars(one))


@pytest.mark.parametrize("blocks", [(), False])
def test_a_module_can_request_one_graph_of_its_full_step(blocks: Any, graphs: Graphs) -> None:
    module = net(Deep, 3)
    module.compile_blocks = blocks
    quiet(max_epochs=1, compile={"backend": graphs}).fit(module, loader())
    assert graphs.count() == 1


def test_a_module_can_name_its_blocks(graphs: Graphs) -> None:
    class Named(Calls):
        compile_blocks = ["Block"]

        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Block(4), Block(4)

        def loss(self, batch: Any) -> Tensor:
            return F.mse_loss(self.net(self.other(self.one(batch[0]))), batch[1])

    quiet(max_epochs=1, compile={"backend": graphs}).fit(net(Named), loader())
    assert graphs.count() == 3  # net, and two for the blocks: without and with a gradient to their input


def test_a_name_of_no_block_is_an_error_that_names_those_there_are() -> None:
    module = net(Deep, 2)
    module.compile_blocks = ["Blok"]
    with pytest.raises(ConfigError, match=r"compile_blocks=.*'Blok'.*Block"):
        quiet(max_epochs=1, compile={"backend": "eager"}).fit(module, loader())


def test_manual_optimization_compiles_the_networks(graphs: Graphs) -> None:
    class Manual(Calls):
        def __init__(self) -> None:
            super().__init__(momentum)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
            self.log("loss", loss)

    expected, module = net(Manual), net(Manual)
    quiet(max_epochs=2).fit(expected, loader())
    for arguments in ({"compile": {"backend": graphs, "fullgraph": True}}, {}):
        module = net(Manual)
        quiet(max_epochs=2, **arguments).fit(module if arguments else torch.compile(module, backend=graphs), loader())
        assert_same(module, expected)
        assert graphs.count() == 1
        torch._dynamo.reset()


def test_a_plain_module_is_compiled_too(graphs: Graphs) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (batch[0] @ self.weight - batch[1]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    expected, module = Plain(), Plain()
    quiet(max_epochs=1).fit(expected, loader())
    quiet(max_epochs=1, compile={"backend": graphs}).fit(module, loader())
    assert_same(module, expected)
    assert graphs.count() == 1


def test_accumulation_clipping_and_autocast_go_with_it(graphs: Graphs) -> None:
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    for precision in ("32-true", "bf16-mixed", "64-true"):
        dtype = torch.float64 if precision == "64-true" else torch.float32
        batches = [tuple(one.to(dtype) for one in batch) for batch in loader(10)]
        expected, module = net(Calls, adam), net(Calls, adam)
        quiet(precision=precision, **options).fit(expected, batches)
        quiet(precision=precision, compile={"backend": graphs}, **options).fit(module, batches)
        assert_same(module, expected)
        assert graphs.count() == 1
        torch._dynamo.reset()


def test_a_run_continues_compiled_from_an_uncompiled_checkpoint_and_back(tmp_path: Path) -> None:
    def fit(epochs: int, path: Path | None, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        module = net(Calls, adam, dropout=0.5)
        trainer = quiet(max_epochs=epochs, **arguments)
        trainer.fit(module, loader(shuffle=True), ckpt_path=path)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return module, torch.load(tmp_path / f"{epochs}.ckpt", weights_only=True)

    expected, state = fit(3, None)
    fit(1, None)
    fit(2, tmp_path / "1.ckpt", compile={"backend": "aot_eager"})
    module, resumed = fit(3, tmp_path / "2.ckpt")
    assert_same(module, expected)
    first, second = state["optimizer_states"][0]["state"], resumed["optimizer_states"][0]["state"]
    assert all(torch.equal(first[key]["exp_avg"], second[key]["exp_avg"]) for key in first)


def test_a_copy_made_during_a_compiled_run_computes_with_its_own_weights(graphs: Graphs) -> None:
    class Copying(lw.Callback):
        copies: tuple[Any, ...] = ()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                self.copies = copy.deepcopy(pl_module), pickle.loads(pickle.dumps(pl_module))

    for arguments in ({}, {"depth": 2}):
        callback = Copying()
        module = net(Deep, **arguments) if arguments else net(Calls, momentum)
        quiet(max_epochs=1, callbacks=callback, compile={"backend": graphs}).fit(module, loader())
        graphs.count()
        batch = next(iter(loader()))
        for twin in callback.copies:
            twin._lw_log = lambda *_: None
            with torch.no_grad():
                for parameter in twin.parameters():
                    parameter.zero_()
            assert twin.training_step(batch, 0) == batch[1].square().mean()
        assert graphs.count() == 0


def test_weights_are_averaged_as_without_it() -> None:
    from loopwright.callbacks import EMA

    expected, module = net(Deep, 2), net(Deep, 2)
    plain, compiled = EMA(decay=0.9), EMA(decay=0.9)
    quiet(max_epochs=1, callbacks=plain).fit(expected, loader(), loader(4))
    quiet(max_epochs=1, callbacks=compiled, compile={"backend": "eager"}).fit(module, loader(), loader(4))
    assert_same(module, expected)


def test_what_looks_into_a_step_sees_that_it_is_compiled(tmp_path: Path, graphs: Graphs) -> None:
    from loopwright.callbacks import TrainingEfficiency
    from loopwright.profilers import PyTorchProfiler

    efficiency = TrainingEfficiency(flops="count", peak_flops=1e12)
    profiler = PyTorchProfiler(dirpath=tmp_path, record_module_names=True, export_to_chrome=False)
    expected, module = net(Calls), net(Calls)
    quiet(max_epochs=2).fit(expected, loader())
    quiet(max_epochs=2, profiler=profiler, callbacks=efficiency, compile={"backend": graphs}).fit(module, loader())
    assert_same(module, expected)
    assert graphs.count() == 1
    assert efficiency.flops_per_sample is None  # not counted, where torch cannot see what runs
    assert efficiency.summary["flops"] > 0


def test_validation_between_steps_leaves_nothing_that_training_cannot_use() -> None:
    class Caching(Calls):
        table: Tensor | None = None

        def loss(self, batch: Any) -> Tensor:
            if self.table is None:
                self.table = torch.ones(1)
            return super().loss(batch) * self.table

    module = net(Caching)
    trainer = quiet(max_epochs=1, compile={"backend": "eager"})
    trainer.validate(module, loader(4), verbose=False)
    trainer.fit(module, loader())
    assert trainer.global_step == 4


def test_a_failing_step_leaves_no_trace(graphs: Graphs) -> None:
    class Failing(Calls):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("boom")

    module = net(Failing)
    with pytest.raises(ValueError, match="boom"):
        quiet(max_epochs=1, compile={"backend": graphs}).fit(module, loader())
    assert "training_step" not in vars(module)
    assert torch._dynamo.config.allow_unspec_int_on_nn_module is False


def test_without_compile_nothing_is_put_on_the_module() -> None:
    class Looking(lw.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert "training_step" not in vars(pl_module)
            assert pl_module._compiled_call_impl is None
            assert pl_module._lw_log.__self__ is trainer._lw_metrics

    quiet(max_epochs=1, callbacks=Looking()).fit(net(Calls), loader())


# -- recompilation -----------------------------------------------------------------------------------------------------


def storm(caplog: pytest.LogCaptureFixture, module: Any, batches: Any, **options: Any) -> list[str]:
    with caplog.at_level(logging.WARNING, "loopwright"):
        quiet(max_epochs=2, compile={"backend": "eager", **options}).fit(module, batches)
    return [record.getMessage() for record in caplog.records if record.name.startswith("loopwright")]


def lengths(count: int) -> list[Any]:
    return [(torch.ones(size, 4), torch.ones(size, 1)) for size in range(2, 2 + count)]


def test_shapes_that_keep_changing_are_named_once_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = storm(caplog, net(Calls), lengths(7), dynamic=False)
    assert "has compiled training_step (test_compiling.py:" in message
    assert "size mismatch at index 0" in message
    assert "drop_last=True" in message
    assert "compile={'dynamic': True}" in message


def test_a_function_that_torch_gives_up_to_compile_does_not_end_the_fit(caplog: pytest.LogCaptureFixture) -> None:
    assert len(storm(caplog, net(Calls), lengths(24), dynamic=False)) == 1


def test_a_block_is_named_by_its_class(caplog: pytest.LogCaptureFixture) -> None:
    class OfBlocks(Calls):
        compile_blocks = [Block]

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(Block(4), nn.Linear(4, 1))

    (message,) = storm(caplog, net(OfBlocks), lengths(7), dynamic=False)
    assert "has compiled Block.forward 6 times" in message
    assert "tensor 'x' size mismatch at index 0" in message


def test_shapes_that_torch_makes_variable_by_itself_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    assert storm(caplog, net(Calls), lengths(8)) == []


def test_python_values_that_keep_changing_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Naming(Calls):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.name = f"batch {batch_idx}"

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) * len(self.name)

    (message,) = storm(caplog, net(Naming), loader(16))
    assert "self.name" in message
    assert "== 'batch " in message
    assert "A Python value changes" in message


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("max-autotune", "True, False or a dict, got compile='max-autotune'"),
        (None, "got compile=None"),
        (1, "got compile=1"),
        ({"fulgraph": True}, r"'fulgraph'.*did you mean 'fullgraph'"),
        ({"backend": "inducter"}, r"'inducter'.*inductor"),
        ({"backend": 3}, "to be a name or a function"),
        ({"mode": "max-speed"}, "'max-speed'"),
        ({"mode": "default", "options": {"max_autotune": True}}, "either 'mode' or 'options'"),
        ({"dynamic": "yes"}, "'dynamic': 'yes'"),
    ],
)
def test_what_compile_cannot_be_is_an_error_in_the_constructor(value: Any, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        quiet(compile=value)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError, match=r"(?s)max_epochs.*compile="):
        quiet(compile="yes", max_epochs=-5)


def fit_single_layers(rank: int, size: int) -> None:
    class Single(Calls):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(4, 1)  # type: ignore[assignment]

    with pytest.warns(UserWarning, match="compile= compiles nothing: Single has only single layers"):
        quiet(max_epochs=1, strategy="fsdp", devices=1, compile={"backend": "eager"}).fit(Single(), loader())


def test_a_module_of_single_layers_under_fsdp_is_reported_as_not_compiled() -> None:
    run_ranks(fit_single_layers, 1, connect=False)


def test_data_parallel_says_what_to_use() -> None:
    trainer = quiet(strategy="dp", devices=2, max_epochs=1, compile=True)
    with pytest.raises(ConfigError, match=r"DataParallelStrategy(?s:.*)strategy='ddp'"):
        trainer.fit(net(Calls), loader())


def test_options_that_the_user_compiled_with_go_before_the_trainers(
    graphs: Graphs, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet(max_epochs=1, compile={"backend": "eager"})
    with caplog.at_level(logging.WARNING, "loopwright"):
        trainer.fit(torch.compile(net(Calls), backend=graphs), loader())
    assert graphs.count() == 1
    assert "keeps those options" in caplog.text


# -- a compiler --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_compiled_code_of_the_machine_trains_to_the_same_loss() -> None:
    """Inductor fuses and reorders sums: float32 results differ in the last digits, here by less than 1e-4 of them."""
    losses, found = [], []
    for options in (False, True):
        torch._dynamo.reset()
        module = net(Deep, 4)
        trainer = quiet(max_epochs=5, compile=options)
        trainer.fit(module, DataLoader(loader(64).dataset, batch_size=8), loader(8))
        losses.append(float(trainer.callback_metrics["val_loss"]))
        found.append(weights(module))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert list(found[0]) == list(found[1])
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-4, atol=1e-5)
