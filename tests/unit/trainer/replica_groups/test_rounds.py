"""LocalSGD and DiLoCo of one group, with a Manager that refuses rounds as it is told to.

Several groups: tests/integration/torchft/test_rounds.py.
"""

from __future__ import annotations

import io
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import LoneManager, answers
from ranks import run_ranks
from torch.utils.data import DataLoader
from toys import Net, ValidatedNet, adam, assert_same, loader, net, pairs, quiet, weights

import loopwright as lw
from loopwright.data.rng import is_same
from loopwright.errors import ConfigError, NonFiniteError
from loopwright.trainer.replica_groups.groups import ReplicaGroups

LOCAL_SGD = lw.TorchFT(sync_every=4)
DILOCO = lw.TorchFT(sync_every=4, outer_optimizer="nesterov")


class Drawing(ValidatedNet):
    """Draws, normalizes and logs."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__(adam, dropout=dropout, norm=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Rows(lw.Callback):
    """Keeps what is known after each step."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def on_train_batch_end(self, trainer: lw.Trainer, *_: object) -> None:
        if trainer.at_step_boundary:
            known = {name: float(value) for name, value in trainer.callback_metrics.items()}
            self.rows.append((trainer.global_step, known))


def fit(module: Any, **arguments: Any) -> lw.Trainer:
    """Train for 3 epochs of 6 steps: rounds end after steps 4, 6, 8, 12, 16, 18."""
    trainer = quiet(max_epochs=3, accumulate_grad_batches=2, **arguments)
    trainer.fit(module, loader(24, shuffle=True), loader(4))
    return trainer


ARGUMENTS: list[dict[str, Any]] = [
    {}, {"precision": "bf16-mixed"}, {"precision": "bf16-true", "compile": {"backend": "aot_eager"}},
]  # fmt: skip


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_local_sgd_of_one_group_is_a_trainer_without_groups(
    managers: list[LoneManager], arguments: dict[str, Any]
) -> None:
    managers.append(LoneManager(answers()))
    plain, grouped = net(ValidatedNet, optimizer=adam), net(ValidatedNet, optimizer=adam)
    torch.manual_seed(7)
    fit(plain, **arguments)
    torch.manual_seed(7)
    fit(grouped, fault_tolerance=LOCAL_SGD, **arguments)
    assert_same(weights(plain), weights(grouped))


def test_the_mean_of_equal_weights_of_16_bits_is_these_weights(
    managers: list[LoneManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    managers.append(LoneManager(answers()))
    monkeypatch.setattr(ReplicaGroups, "exchange", lambda self, own: [own] * 7)
    monkeypatch.setattr(ReplicaGroups, "reduce", _sum_of_seven)
    plain, grouped = net(optimizer=adam), net(optimizer=adam)
    quiet(max_steps=12, precision="bf16-true").fit(plain, loader(48))
    quiet(max_steps=12, precision="bf16-true", fault_tolerance=LOCAL_SGD).fit(grouped, loader(48))
    assert grouped.net[0].weight.dtype == torch.bfloat16
    assert_same(weights(plain), weights(grouped))


def _sum_of_seven(groups: ReplicaGroups, tensors: list[torch.Tensor]) -> bool:
    """Add up as gloo does, one group after the other."""
    for tensor in tensors:
        own = tensor.clone()
        for _ in range(6):
            tensor += own
    return True


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
@pytest.mark.parametrize("options", [LOCAL_SGD, DILOCO], ids=["local_sgd", "diloco"])
def test_a_refused_round_leaves_no_trace(
    managers: list[LoneManager], options: lw.TorchFT, arguments: dict[str, Any]
) -> None:
    ends = []
    for refused in ((), (0, 3, 4)):
        manager, rows = LoneManager(answers(*refused)), Rows()
        managers.append(manager)
        torch.manual_seed(5)
        module = Drawing()
        trainer = fit(module, fault_tolerance=options, callbacks=[rows], **arguments)
        assert (manager.steps, manager.refused) == (6, len(refused))
        ends.append((trainer, module, dict(rows.rows), manager))
    (undisturbed, module, rows, _), (refused_run, other, other_rows, _) = ends
    assert_same(weights(module), weights(other))
    assert_same(dict(module.named_buffers()), dict(other.named_buffers()))
    assert is_same(undisturbed.optimizers[0].state_dict(), refused_run.optimizers[0].state_dict())
    assert is_same(undisturbed.callback_metrics, refused_run.callback_metrics)
    refused_run.progress.validated_s = undisturbed.progress.validated_s  # a clock's
    assert undisturbed.progress == refused_run.progress
    assert rows == other_rows


def test_values_of_steps_are_known_at_the_end_of_a_round(managers: list[LoneManager]) -> None:
    managers.append(LoneManager(answers()))
    rows, plain_rows = Rows(), Rows()
    for callback, options in ((plain_rows, {}), (rows, {"fault_tolerance": LOCAL_SGD})):
        torch.manual_seed(5)
        fit(Drawing(dropout=0.0), callbacks=[callback], **options)
    assert "loss_step" not in rows.rows[0][1]
    changes = [step for (_, before), (step, after) in zip(rows.rows, rows.rows[1:], strict=False) if before != after]
    assert set(changes) <= {4, 6, 7, 8, 12, 13, 16, 18}  # 7 and 13: after a validation
    plain = dict(plain_rows.rows)
    for step, known in rows.rows:
        if step in (4, 6, 8, 12, 16, 18):
            assert known == plain[step]


def trained_by_hand(ends: list[int], data: Any) -> torch.nn.Module:
    """Return a module after DiLoCo with rounds that end after these steps."""
    hand = net(optimizer=adam).double()
    inner = adam(hand.parameters())
    whole = [torch.nn.Parameter(one.detach().clone()) for one in hand.parameters()]
    outer = torch.optim.SGD(whole, lr=0.7, momentum=0.9, nesterov=True)
    for step, (x, y) in zip(range(1, max(ends) + 1), data, strict=False):
        inner.zero_grad()
        (hand(x) - y).square().mean().backward()
        inner.step()
        if step == 6 and step not in ends:  # a checkpoint within a round, which is continued as a new one
            for one, trained in zip(whole, hand.parameters(), strict=True):
                one.data.copy_(trained)
        if step in ends:
            for one, trained in zip(whole, hand.parameters(), strict=True):
                one.grad = one.detach() - trained.detach()
            outer.step()
            for one, trained in zip(whole, hand.parameters(), strict=True):
                trained.data.copy_(one)
    return hand


def test_diloco_of_one_group_equals_a_loop_by_hand(managers: list[LoneManager], tmp_path: Path) -> None:
    managers += [LoneManager(answers()) for _ in range(3)]
    data = DataLoader(pairs(24, dtype=torch.float64), batch_size=2)  # 12 batches
    module = net(optimizer=adam).double()
    quiet(max_steps=6, fault_tolerance=DILOCO).fit(module, data)
    assert_same(weights(module), weights(trained_by_hand([4, 6], data)))  # the last round is short

    class Save(lw.Callback):
        def on_train_batch_end(self, trainer: lw.Trainer, *_: object) -> None:
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "six.ckpt")

    quiet(max_steps=8, callbacks=[Save()], fault_tolerance=DILOCO).fit(net(optimizer=adam).double(), data)
    module = net(optimizer=adam).double()
    quiet(max_steps=10, fault_tolerance=DILOCO).fit(module, data, ckpt_path=tmp_path / "six.ckpt")
    assert_same(weights(module), weights(trained_by_hand([4, 8, 10], data)))


def test_rounds_continue_a_run_that_summed_gradients(managers: list[LoneManager], tmp_path: Path) -> None:
    managers += [LoneManager(answers()) for _ in range(2)]
    trainer = quiet(max_steps=4, fault_tolerance=lw.TorchFT())
    trainer.fit(net(optimizer=adam), loader(48))
    trainer.save_checkpoint(tmp_path / "four.ckpt")
    module, plain = net(optimizer=adam, seed=2), net(optimizer=adam)
    quiet(max_steps=9, fault_tolerance=LOCAL_SGD).fit(module, loader(48), ckpt_path=tmp_path / "four.ckpt")
    quiet(max_steps=9).fit(plain, loader(48))
    assert_same(weights(module), weights(plain))


def test_a_resumed_run_continues_with_the_outer_optimizer(managers: list[LoneManager], tmp_path: Path) -> None:
    managers += [LoneManager(answers()) for _ in range(3)]
    whole, parts = net(optimizer=adam), net(optimizer=adam)
    quiet(max_steps=12, fault_tolerance=DILOCO).fit(whole, loader(48))
    trainer = quiet(max_steps=8, fault_tolerance=DILOCO)
    trainer.fit(parts, loader(48))
    trainer.save_checkpoint(tmp_path / "eight.ckpt")
    again = net(optimizer=adam, seed=2)
    quiet(max_steps=12, fault_tolerance=DILOCO).fit(again, loader(48), ckpt_path=tmp_path / "eight.ckpt")
    assert_same(weights(whole), weights(again))


def test_a_group_takes_its_own_inner_state_from_a_checkpoint(managers: list[LoneManager], tmp_path: Path) -> None:
    managers += [LoneManager(answers()) for _ in range(2)]
    trainer = quiet(max_steps=4, fault_tolerance=LOCAL_SGD)
    trainer.fit(net(optimizer=adam), loader(48))
    trainer.save_checkpoint(tmp_path / "four.ckpt")
    checkpoint = torch.load(tmp_path / "four.ckpt", weights_only=False)
    own = {
        number: {**one, "exp_avg": one["exp_avg"] + 1}
        for number, one in checkpoint["optimizer_states"][0]["state"].items()
    }
    buffer = io.BytesIO()
    torch.save([own], buffer)
    checkpoint["torchft"]["rounds"]["inner"] = {"0": torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)}
    torch.save(checkpoint, tmp_path / "of_both.ckpt")
    again = quiet(max_steps=4, fault_tolerance=LOCAL_SGD)
    again.fit(net(optimizer=adam), loader(48), ckpt_path=tmp_path / "of_both.ckpt")
    assert is_same(again.optimizers[0].state_dict()["state"], own)


def test_a_bad_loss_ends_the_fit_before_other_groups_get_its_weights(managers: list[LoneManager]) -> None:
    class Bad(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 1 else 1.0)

    managers.append(manager := LoneManager(answers()))
    trainer = quiet(max_steps=8, nonfinite_loss="raise", log_every_n_steps=0, fault_tolerance=LOCAL_SGD)
    with pytest.raises(NonFiniteError):
        trainer.fit(net(Bad), loader(48))
    assert manager.steps == manager.refused == 0


def test_a_request_to_stop_waits_for_the_end_of_the_round(managers: list[LoneManager]) -> None:
    class Stop(lw.Callback):
        def on_train_batch_end(self, trainer: lw.Trainer, *_: object) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == 6

    managers.append(LoneManager(answers()))
    trainer = quiet(max_steps=100, callbacks=[Stop()], fault_tolerance=LOCAL_SGD)
    trainer.fit(net(), loader(100))
    assert trainer.global_step == 8


def steps_of_ranks(rank: int, size: int) -> int:
    """Return the steps of a group of ranks, of which one asks to stop when others may have begun the next round."""

    class Stop(lw.Callback):
        def on_validation_end(self, trainer: lw.Trainer, *_: object) -> None:
            trainer.should_stop = rank == 0 and trainer.global_step == 8

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplicaGroups, "_connect", lambda self: setattr(self, "manager", LoneManager(answers(2))))
        options = lw.TorchFT(replica_id="0", lighthouse_addr="http://nowhere:1", sync_every=4)
        trainer = quiet(
            max_steps=100, callbacks=[Stop()], fault_tolerance=options, strategy="ddp", devices=size,
            val_check_interval=8,
        )  # fmt: skip
        trainer.fit(net(ValidatedNet), loader(200), loader(4))
    return trainer.global_step


def test_a_request_of_one_rank_to_stop_waits_for_the_end_of_the_round_that_others_have_begun() -> None:
    pytest.importorskip("torchft")
    first, second = run_ranks(steps_of_ranks, 2, connect=False)
    assert first == second
    assert first in (8, 12)


def test_a_skipped_rest_of_an_epoch_ends_the_round(managers: list[LoneManager]) -> None:
    module = net()
    module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 6 else None
    managers.append(manager := LoneManager(answers()))
    trainer = quiet(max_epochs=2, fault_tolerance=LOCAL_SGD)
    trainer.fit(module, loader(100))
    assert (trainer.global_step, manager.steps) == (12, 5)  # rounds end after steps 4, 6, 8, 12; one has no step


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"callbacks": [lw.EMA(decay=0.9)]}, "EMA"),
        ({"precision": "16-mixed"}, "precision='16-mixed'"),
        ({"callbacks": [lw.ModelCheckpoint(every_n_train_steps=6)]}, r"every_n_train_steps=6\)"),
        ({"callbacks": [lw.ModelCheckpoint(train_time_interval=timedelta(hours=1))]}, "train_time_interval"),
        ({"callbacks": [lw.Snapshot(every=2)]}, r"Snapshot\(every=2\)"),
        ({"nonfinite_loss": "skip"}, "nonfinite_loss='skip'"),
        ({"max_time": timedelta(hours=1)}, "max_time"),
        ({"val_check_interval": timedelta(hours=1)}, "interval in time"),
        ({"logger": lw.CSVLogger("unused"), "log_every_n_steps": 6}, "log_every_n_steps=6"),
    ],
)
def test_what_rounds_cannot_follow_is_refused(
    managers: list[LoneManager], arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    managers.append(LoneManager(answers()))
    trainer = quiet(
        max_steps=1, default_root_dir=tmp_path, enable_checkpointing=True, fault_tolerance=LOCAL_SGD, **arguments
    )
    with pytest.raises(ConfigError, match=message):
        trainer.fit(net(ValidatedNet), loader(), loader())


@pytest.mark.parametrize(
    "arguments",
    [
        {"sync_every": 0},
        {"outer_optimizer": "nesterov"},
        {"sync_every": 4, "outer_optimizer": "adam"},
        {"sync_every": 4, "outer_optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
    ],
)
def test_options_that_make_no_rounds_are_refused(arguments: dict[str, Any]) -> None:
    pytest.importorskip("torchft")
    with pytest.raises(ConfigError, match="sync_every|outer_optimizer"):
        lw.TorchFT(**arguments)


def test_an_outer_optimizer_is_built_from_the_weights() -> None:
    pytest.importorskip("torchft")
    make = partial(torch.optim.SGD, lr=0.5)
    assert lw.TorchFT(sync_every=4, outer_optimizer=make).outer() is make
