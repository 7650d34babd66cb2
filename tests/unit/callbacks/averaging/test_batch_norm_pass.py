from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader
from toys import Net, loader, momentum, net, pairs, quiet

from loopwright.callbacks import Callback
from loopwright.callbacks.averaging.batch_norm_pass import renew_running_statistics


class Renew(Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        norms = [one for one in pl_module.modules() if isinstance(one, nn.BatchNorm1d)]
        renew_running_statistics(trainer, pl_module, norms)


def test_statistics_are_torchs() -> None:
    module = net(Net, momentum, norm=True)
    quiet(max_epochs=2, callbacks=[Renew()]).fit(module, loader(8, 2))
    reference = net(Net, momentum, norm=True)
    reference.load_state_dict(module.state_dict())
    update_bn((batch[0] for batch in loader(8, 2)), reference)
    assert torch.equal(module.net[2].running_mean, reference.net[2].running_mean)
    assert torch.equal(module.net[2].running_var, reference.net[2].running_var)


def test_a_limit_on_batches_holds_and_nothing_is_counted() -> None:
    module = net(Net, momentum, norm=True)
    trainer = quiet(max_epochs=2, limit_train_batches=3, callbacks=[Renew()])
    trainer.fit(module, loader(8, 2))
    assert module.net[2].num_batches_tracked == 3
    assert (trainer.global_step, trainer.progress.total_batches) == (6, 6)


def test_the_loaders_own_generator_stands_where_training_left_it() -> None:
    def run(*callbacks: Callback) -> torch.Tensor:
        generator = torch.Generator().manual_seed(4)
        data = DataLoader(pairs(8), batch_size=2, shuffle=True, generator=generator)
        quiet(max_epochs=2, callbacks=list(callbacks)).fit(net(Net, momentum, norm=True), data)
        return generator.get_state()

    assert torch.equal(run(Renew()), run())


def test_a_norm_that_no_batch_reaches_and_a_step_of_the_batch_alone() -> None:
    class Short(Net):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.unused = nn.BatchNorm1d(3)
            self.unused.running_mean.fill_(5.0)  # type: ignore[union-attr]

        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return self.loss(batch)

    module = net(Short, momentum, norm=True)
    quiet(max_epochs=1, callbacks=[Renew()]).fit(module, loader(8, 2))
    assert module.unused.running_mean.tolist() == [5.0] * 3
    assert module.net[2].num_batches_tracked == 4
    assert module.net[2].momentum == module.unused.momentum == 0.1
