"""A sharded module, and parts of it, called in hooks and callbacks: the values of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import loopwright as lw
from loopwright.strategies import FSDPStrategy, MeshStrategy

# Any in this file: strategies, batches, and results that travel between processes.

X = torch.ones(2, 4, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Net(lw.Module):
    def __init__(self, *, is_manual: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 1)
        self.automatic_optimization = not is_manual

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch[0]).square().mean()
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


CALLS: dict[str, Callable[[Any, Any], Tensor]] = {
    "a unit": lambda trainer, net: net.blocks[0](X),  # the first of all: it must not take itself for the root
    "the module": lambda trainer, net: net(X),
    "trainer.model": lambda trainer, net: trainer.model(X),
    "layers": lambda trainer, net: net.head(net.first(X)),
}
HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_after_backward", "on_before_optimizer_step",
    "on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end", "on_train_end",
)  # fmt: skip


class Sampler(lw.Callback):
    """Calls the module in every hook, with and without gradients."""

    def __init__(self) -> None:
        self.found: list[tuple[str, list[float]]] = []

    def sample(self, hook: str, trainer: Any, module: Any) -> None:
        for name, call in CALLS.items():
            # A graph that no backward pass uses must not leave anything behind.
            with torch.set_grad_enabled(hook in ("on_train_epoch_start", "on_train_epoch_end")):
                self.found.append((f"{name} in {hook}", call(trainer, module).detach().flatten().tolist()))


def _hook(name: str) -> Callable[..., None]:
    def hook(self: Sampler, trainer: Any, module: Any, *_: object) -> None:
        self.sample(name, trainer, module)

    return hook


for _name in HOOKS:
    setattr(Sampler, _name, _hook(_name))


def strategy_of(name: str) -> Any:
    return {
        "one": lambda: "auto",
        "fsdp": FSDPStrategy,
        "units": lambda: FSDPStrategy(auto_wrap_policy={Block}),
        "tp": lambda: MeshStrategy(tp=2, fsdp=1, tensor_plan={"blocks.*.layer": "colwise_gather_output"}),
    }[name]()


def fit(rank: int, size: int, name: str, *, is_manual: bool, folder: Any) -> Any:
    sampler, net = Sampler(), Net(is_manual=is_manual)
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x), batch_size=4 if name in ("fsdp", "units") else 8)
    trainer = lw.Trainer(
        accelerator="cpu", devices=size, strategy=strategy_of(name), precision="64-true", max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[sampler], enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(net, loader, loader)
    path = folder / f"{name}.ckpt"
    trainer.save_checkpoint(path)
    return sampler.found, torch.load(path, weights_only=True)["state_dict"] if rank == 0 else None


@pytest.mark.parametrize("is_manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("name", ["fsdp", "units", "tp"])
def test_a_call_in_any_hook_is_that_of_one_process(name: str, is_manual: bool, tmp_path: Any) -> None:
    ((wanted, state),) = run_ranks(fit, 1, "one", is_manual=is_manual, folder=tmp_path, connect=False)
    first, second = run_ranks(fit, 2, name, is_manual=is_manual, folder=tmp_path, connect=False)
    for found in (first[0], second[0]):
        assert [place for place, _ in found] == [place for place, _ in wanted]
        for (place, values), (_, expected) in zip(found, wanted, strict=True):
            # Only the order of additions over samples differs.
            assert values == pytest.approx(expected, rel=1e-9), place
    for key, value in state.items():
        torch.testing.assert_close(first[1][key], value, rtol=1e-9, atol=1e-12)


def read_weight(rank: int, size: int) -> list[str]:
    class Reading(Net):
        def on_train_epoch_end(self) -> None:
            X @ self.head.weight.T

    trainer = lw.Trainer(
        accelerator="cpu", devices=2, strategy="fsdp", precision="64-true", max_epochs=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, limit_val_batches=0,
    )  # fmt: skip
    try:
        trainer.fit(Reading(is_manual=False), [[X], [X]])
    except RuntimeError as error:
        return getattr(error, "__notes__", [str(error)])  # of another rank, if it was the first that failed
    return []


def test_a_weight_that_is_read_in_a_hook_is_an_error_that_names_what_to_call() -> None:
    for notes in run_ranks(read_weight, 2, connect=False):
        (advice,) = [note for note in notes if "full_tensor()" in note]
        assert "In a hook or callback, call the module, a layer of it, or trainer.model(...)" in advice
