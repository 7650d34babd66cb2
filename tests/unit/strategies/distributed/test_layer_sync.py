from __future__ import annotations

import pytest
import torch
from torch import nn

from loopwright.errors import ConfigError
from loopwright.strategies import TorchSyncBatchNorm
from loopwright.strategies.distributed.layer_sync import check_sync_batchnorm


class Own(nn.BatchNorm2d):
    """A batch norm of the user's."""


def model() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 1), Own(2), nn.Sequential(nn.BatchNorm1d(3, affine=False)))


def test_batch_norms_are_replaced_and_the_users_own_come_back_with_what_was_learned() -> None:
    sync = TorchSyncBatchNorm()
    module = model()
    own, inner = module[1], module[2][0]
    own.eval()
    names = list(module.state_dict())
    applied = sync.apply(module)
    assert applied is module
    assert [type(layer).__name__ for layer in module.modules()].count("SyncBatchNorm") == 2
    assert list(module.state_dict()) == names
    assert not module[1].training
    module.double()  # replaces tensors
    with torch.no_grad():
        module[1].weight.fill_(3.0)
        module[1].running_mean.fill_(2.0)
    assert sync.revert(module) is module
    assert module[1] is own
    assert module[2][0] is inner
    assert own.weight.dtype == torch.float64
    assert own.weight.tolist() == [3, 3]
    assert own.running_mean is not None
    assert own.running_mean.tolist() == [2, 2]


def test_a_layer_by_itself_is_exchanged_too() -> None:
    sync = TorchSyncBatchNorm()
    layer = nn.BatchNorm1d(2)
    assert isinstance(sync.apply(layer), nn.SyncBatchNorm)
    given = nn.SyncBatchNorm(2)
    assert sync.revert(sync.apply(given)) is given, "the user's own stays"


def test_on_the_cpu_the_layers_are_named() -> None:
    module = TorchSyncBatchNorm().apply(model())
    check_sync_batchnorm(model(), torch.device("cpu"))
    check_sync_batchnorm(module, torch.device("cuda"))
    with pytest.raises(ConfigError, match=r"1, 2\.0 on 'cpu'"):
        check_sync_batchnorm(module, torch.device("cpu"))
