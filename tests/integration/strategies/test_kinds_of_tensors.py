"""Odd parameters, buffers and gradients on two ranks: clipped, saved and resumed as on one process, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import FSDPStrategy, MeshStrategy

# Any in this file: modules by kind, strategies, and results that travel between processes.


class Kind(lw.Module):
    """A layer, and what a function adds to it and uses."""

    def __init__(self, kind: str, *, clip: str | None, is_manual: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.rows = torch.zeros(0, dtype=torch.int64)
        build, self.use = KINDS[kind]
        build(self)
        self.clip, self.automatic_optimization = clip, not is_manual

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (x,) = batch
        self.rows = (x[:, 0] * 100).long().abs() % 6
        loss = (self.use(self, self.layer(x)) - 0.5).abs().square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            if self.clip is not None:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm=self.clip)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)


def parameter(make: Callable[[], Tensor], *, trained: bool = True) -> Callable[[Any], None]:
    return lambda self: self.register_parameter("odd", nn.Parameter(make(), requires_grad=trained))


def buffer(make: Callable[[], Tensor]) -> Callable[[Any], None]:
    return lambda self: self.register_buffer("odd", make())


def module(make: Callable[[Any], nn.Module]) -> Callable[[Any], None]:
    return lambda self: self.add_module("odd", make(self))


def tied(self: Any) -> nn.Module:
    other = nn.Linear(4, 4)
    other.weight = self.layer.weight
    return other


Parts = tuple[Callable[[Any], None], Callable[[Any, Tensor], Tensor]]
KINDS: dict[str, Parts] = {
    "sparse gradient": (module(lambda _: nn.Embedding(6, 4, sparse=True)), lambda self, x: x + self.odd(self.rows)),
    "complex": (parameter(lambda: torch.ones(4) * (1 + 1j)), lambda self, x: (x * self.odd).abs()),
    "float64": (parameter(lambda: torch.ones(4, dtype=torch.float64)), lambda self, x: x * self.odd),
    "float64 layer": (module(lambda _: nn.Linear(4, 4).double()), lambda self, x: self.odd(x.double())),
    "bfloat16": (parameter(lambda: torch.ones(4, dtype=torch.bfloat16)), lambda self, x: x * self.odd),
    "integers": (parameter(lambda: torch.arange(4), trained=False), lambda self, x: x * self.odd),
    "empty": (parameter(lambda: torch.empty(0, 4)), lambda self, x: x + self.odd.sum(0)),
    "no dimension": (parameter(lambda: torch.tensor(1.5)), lambda self, x: x * self.odd),
    "not contiguous": (parameter(lambda: torch.randn(4, 4).t()), lambda self, x: x @ self.odd),
    "channels last": (
        module(lambda _: nn.Conv2d(4, 4, 2).to(memory_format=torch.channels_last)),
        lambda self, x: self.odd(x[:, :, None, None].expand(-1, -1, 2, 2)).flatten(1),
    ),
    "tied": (module(tied), lambda self, x: self.odd(x)),
    "float8 buffer": (
        buffer(lambda: torch.randn(4).to(torch.float8_e4m3fn)), lambda self, x: x * self.odd.float()
    ),
    "sparse buffer": (buffer(lambda: torch.eye(4).to_sparse()), lambda self, x: torch.sparse.mm(self.odd, x.t()).t()),
    "boolean buffer": (buffer(lambda: torch.tensor([True, False, True, True])), lambda self, x: x * self.odd),
    "complex buffer": (buffer(lambda: torch.ones(4) * 1j), lambda self, x: (x * self.odd).abs()),
    "empty buffer": (buffer(lambda: torch.empty(0)), lambda self, x: x + self.odd.sum()),
}  # fmt: skip
CASES = [(kind, clip, manual) for kind in KINDS for clip in (None, "norm", "value") for manual in (False, True)]


def strategy_of(name: str) -> Any:
    return {
        "one": lambda: "auto",
        "ddp": lambda: "ddp",
        "fsdp": lambda: "fsdp",
        "units": lambda: FSDPStrategy(auto_wrap_policy={nn.Linear}),
        "tp": lambda: MeshStrategy(tp=2, fsdp=1, tensor_plan={"layer": "colwise_gather_output"}),
    }[name]()


def train(name: str, size: int, case: tuple[str, str | None, bool], path: Path) -> dict[str, Tensor]:
    kind, clip, is_manual = case
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(5))
    loader = DataLoader(TensorDataset(x), batch_size=8 if name in ("one", "tp") else 4)
    options: dict[str, Any] = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": clip}
    for epochs in (1, 2):
        net = Kind(kind, clip=clip, is_manual=is_manual)
        trainer = lw.Trainer(
            accelerator="cpu", devices=size, strategy=strategy_of(name), max_epochs=epochs, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            **({} if is_manual or clip is None else options),
        )  # fmt: skip
        trainer.fit(net, loader, ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
    with torch.no_grad():
        state: dict[str, Any] = net.state_dict()
        full = {key: one.full_tensor() if hasattr(one, "full_tensor") else one for key, one in state.items()}
        return {key: one.detach().to_dense().to(torch.complex128) for key, one in full.items()}


def cases_of(name: str) -> list[tuple[str, str | None, bool]]:
    """Return the cases of a strategy. Each fit on a mesh makes its groups anew, with their threads: fewer for tp."""
    return [case for case in CASES if name != "tp" or case[1:] == ("norm", False)]


def train_all(rank: int, size: int, name: str, folder: Path) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for number, case in enumerate(cases_of(name)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch, on complex numbers that are printed or cast
                results[case] = train(name, size, case, folder / f"{name}-{number}.ckpt")
        except lw.errors.LoopwrightError as error:
            results[case] = str(error)
    return results


REFUSED = {
    ("sparse gradient", "fsdp"): "The embeddings odd have sparse gradients, which cannot be sharded",
    ("sparse gradient", "units"): "The embeddings odd have sparse gradients, which cannot be sharded",
    ("sparse gradient", "tp"): "have sparse gradients",
    ("tied", "manual"): "share the parameter 'weight'",
    ("complex", "value"): "Expected real gradients for clipping by value with",
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(train_all, 1, "one", tmp_path_factory.mktemp("one"), connect=False, timeout_s=200)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp", "units", "tp"])
def test_odd_tensors_are_trained_as_on_one_process_or_refused(name: str, expected: Any, tmp_path: Path) -> None:
    first, second = run_ranks(train_all, 2, name, tmp_path, connect=False, timeout_s=200)
    wrong: list[str] = []
    for case in cases_of(name):
        wanted = expected[case]
        kind, clip, is_manual = case
        found, other = first[case], second[case]
        if isinstance(found, str):
            reasons = [REFUSED.get((kind, one)) for one in (name, clip, "manual" if is_manual else None)]
            if not any(reason is not None and reason in found for reason in reasons):
                wrong.append(f"{case}: {found}")
        elif isinstance(wanted, str):
            wrong.append(f"{case}: trained, which one process refuses")
        else:
            for key, value in wanted.items():
                if not torch.equal(found[key], other[key]):
                    wrong.append(f"{case}: ranks differ in {key}")
                # Only the order of additions over samples differs; bfloat16 has 8 bits.
                if not torch.allclose(found[key], value, rtol=1e-2 if kind == "bfloat16" else 1e-4, atol=1e-5):
                    wrong.append(f"{case}: {key} differs from one process")
    assert not wrong, "\n".join(wrong)
