"""Copies that are made later hold the bytes of when they were asked for, whoever writes in between."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loopwright.checkpoint.checkpoint_io import before_next_step
from loopwright.checkpoint.saving import deferred_copy
from loopwright.checkpoint.saving.deferred_copy import DeferredCopies
from loopwright.checkpoint.saving.host_copy import HostCopy

SIZE = 100_000

if not deferred_copy._has_sharing():
    pytest.skip("this torch cannot share memory until it is written to", allow_module_level=True)


def add(copies: DeferredCopies, source: Tensor) -> tuple[Tensor, bool]:
    """Return the tensor that receives the bytes, and whether they will be copied."""
    target = torch.zeros_like(source)
    return target, copies.add(source.untyped_storage(), target.untyped_storage())


def release_all() -> None:
    for finish in tuple(before_next_step):
        finish()


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if value.numel() == SIZE]


def adam(**options: bool) -> torch.optim.Optimizer:
    """Return an optimizer with a state of two large tensors."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(SIZE))
    weight.grad = torch.randn(SIZE)
    optimizer = torch.optim.Adam([weight], **options)
    optimizer.step()
    return optimizer


def through_numpy(tensor: Tensor) -> None:
    tensor.numpy()[:] = 7


def through_an_address(tensor: Tensor) -> None:
    ctypes.memset(tensor.data_ptr(), 1, tensor.nbytes)


def through_a_storage(tensor: Tensor) -> None:
    tensor.untyped_storage().fill_(3)


def through_an_item_of_the_storage(tensor: Tensor) -> None:
    tensor.untyped_storage()[1] = 3


WRITERS: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda tensor: tensor.add_(1),
    "data": lambda tensor: tensor.data.mul_(2),
    "a view": lambda tensor: tensor[5:7].fill_(9),
    "an index": lambda tensor: tensor.__setitem__(3, 5.0),
    "copy": lambda tensor: tensor.copy_(torch.ones(SIZE)),
    "out": lambda tensor: torch.add(torch.ones(SIZE), 1, out=tensor),
    "foreach": lambda tensor: torch._foreach_add_([tensor], 1.0),
    "detached": lambda tensor: tensor.detach().clamp_(min=0),
    "a random fill": lambda tensor: tensor.normal_(),
    "an alias": lambda tensor: torch.empty(0).set_(tensor.untyped_storage(), 0, (SIZE,)).zero_(),
    "numpy": through_numpy,
    "dlpack": lambda tensor: torch.from_dlpack(tensor).zero_(),
    "address": through_an_address,
    "an optimizer's own kernel": lambda tensor: torch._fused_adamw_(
        [torch.ones(SIZE)],
        [torch.ones(SIZE)],
        [tensor],
        [torch.ones(SIZE)],
        [],
        [torch.ones(())],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.0,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    ),
    "storage": through_a_storage,
    "item": through_an_item_of_the_storage,
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("is_copied_before", [False, True])
def test_a_writer_does_not_change_what_is_copied(write: Callable[[Tensor], object], is_copied_before: bool) -> None:
    source = torch.randn(SIZE)
    before, alone = source.clone(), source.clone()
    copies = DeferredCopies()
    target, is_deferred = add(copies, source)
    assert is_deferred
    if is_copied_before:
        copies.copy()
    torch.manual_seed(1)
    write(source)
    copies.copy()
    copies.release()
    assert torch.equal(target, before)
    torch.manual_seed(1)
    write(alone)
    assert torch.equal(source, alone)  # the writer's own work is what it would have been
    assert copies.was_overtaken


def test_a_tensor_that_gets_other_memory_leaves_the_copy_as_it_was() -> None:
    source = torch.randn(SIZE)
    before = source.clone()
    copies = DeferredCopies()
    target, _ = add(copies, source)
    source.set_(torch.ones(SIZE))
    copies.release()
    assert torch.equal(target, before)
    assert source.eq(1).all()


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_step_that_does_not_wait_steps_as_ever_and_changes_no_copy(options: dict[str, bool]) -> None:
    optimizer, other = adam(**options), adam(**options)
    before = [one.clone() for one in state_of(optimizer)]
    copier = HostCopy(keeps_memory=True)
    taken = copier.take({"optimizer": optimizer.state_dict()})
    for one in (optimizer, other):
        one.step()
    taken.settle()
    copied = taken.checkpoint["optimizer"]["state"][0]
    assert [torch.equal(copied[key], old) for key, old in zip(("exp_avg", "exp_avg_sq"), before, strict=True)] == [1, 1]
    assert all(map(torch.equal, state_of(optimizer), state_of(other)))
    copier.release()
    addresses = [one.data_ptr() for one in state_of(optimizer)]
    copier.take({"optimizer": optimizer.state_dict()})  # a program that overtakes has all copied at once from then on
    assert not before_next_step
    assert [one.data_ptr() for one in state_of(optimizer)] == addresses


def test_memory_comes_back_as_it_was_when_it_is_released() -> None:
    optimizer = adam()
    addresses = [one.data_ptr() for one in state_of(optimizer)]
    copier = HostCopy(keeps_memory=True)
    for _ in range(3):
        taken = copier.take({"optimizer": optimizer.state_dict()})
        assert len(before_next_step) == 1
        thread = threading.Thread(target=taken.settle)
        thread.start()
        release_all()
        thread.join()
        assert not before_next_step
        assert not any(torch._C._is_cow_tensor(one) for one in state_of(optimizer))
        assert [one.data_ptr() for one in state_of(optimizer)] == addresses
        copied = taken.checkpoint["optimizer"]["state"][0]
        assert all(map(torch.equal, (copied["exp_avg"], copied["exp_avg_sq"]), state_of(optimizer)))
        optimizer.step()
    copier.forget()


def test_a_release_copies_when_no_thread_does() -> None:
    copies = DeferredCopies()
    sources = [torch.randn(SIZE) for _ in range(3)]
    targets = [add(copies, source)[0] for source in sources]
    copies.start()
    release_all()
    assert all(map(torch.equal, sources, targets))
    assert not copies.was_overtaken
    copies.copy()  # a thread that comes late has nothing to do


def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = DeferredCopies()
    sources = [torch.randn(SIZE) for _ in range(20)]
    targets = [add(copies, source)[0] for source in sources]
    threads = [threading.Thread(target=copies.copy) for _ in range(3)]
    for thread in threads:
        thread.start()
    copies.release()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert all(map(torch.equal, sources, targets))


def test_a_copy_that_fails_is_an_error_for_the_writer_and_does_not_stop_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: object) -> None:
        raise RuntimeError("no memory")

    copies = DeferredCopies()
    source = torch.randn(SIZE)
    add(copies, source)
    monkeypatch.setattr(deferred_copy._Share, "copy", fail)
    with pytest.raises(RuntimeError, match="state of an optimizer could not be copied: no memory"):
        copies.copy()
    copies.release()
    source += 1
    with pytest.raises(RuntimeError, match="no memory"):
        copies.copy()


def test_memory_whose_writers_cannot_be_noticed_is_copied_at_once(tmp_path: Path) -> None:
    seen = torch.randn(SIZE)
    view = seen.numpy()
    torch.save(torch.randn(SIZE), tmp_path / "a")
    (tmp_path / "raw").write_bytes(bytes(4 * SIZE))
    refused = {
        "seen by NumPy": seen,
        "of NumPy": torch.from_numpy(view.copy()),
        "shared between processes": torch.randn(SIZE).share_memory_(),
        "loaded": torch.load(tmp_path / "a"),
        "mapped": torch.from_file(str(tmp_path / "raw"), size=SIZE),
        "of a buffer": torch.frombuffer(bytearray(4 * SIZE), dtype=torch.float32),
        "small": torch.randn(10),
    }
    copies = DeferredCopies()
    assert [name for name, tensor in refused.items() if add(copies, tensor)[1]] == []
    assert not any(torch._C._is_cow_tensor(tensor) for tensor in refused.values())


def test_weights_and_what_is_not_of_an_optimizer_are_copied_at_once() -> None:
    weight, buffer = torch.nn.Parameter(torch.randn(SIZE)), torch.randn(SIZE)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(SIZE)
    optimizer.step()
    (momentum,) = state_of(optimizer)
    average = momentum.clone()
    content = {"state_dict": {"w": weight, "b": buffer}, "average": average, "optimizer": optimizer.state_dict()}
    taken = HostCopy(keeps_memory=True).take(content)
    shared = {"w": weight, "b": buffer, "average": average, "momentum": momentum}
    assert [name for name, one in shared.items() if torch._C._is_cow_tensor(one)] == ["momentum"]
    before = momentum.clone()
    momentum.zero_()
    taken.settle()
    assert torch.equal(taken.checkpoint["optimizer"]["state"][0]["momentum_buffer"], before)
    release_all()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_does_not_wait_for_a_thread_that_it_lacks() -> None:
    copies = DeferredCopies()
    source = torch.randn(SIZE)
    add(copies, source)
    copies._left.clear()  # a thread has taken it and is at it
    copies.start()
    process = os.fork()
    if process == 0:
        release_all()
        source.add_(1)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    before_next_step.clear()
