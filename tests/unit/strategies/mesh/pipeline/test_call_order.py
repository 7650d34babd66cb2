"""The order in which a module calls its submodules, read from its source."""

from __future__ import annotations

from torch import Tensor, nn

from loopwright.strategies.mesh.pipeline.call_order import called_before


class Model(nn.Module):
    """Names of submodules are enough: nothing runs."""

    def forward(self, x: Tensor) -> Tensor:
        if self.first is None or self.last is None:  # no calls
            return x
        x = self._begin(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))

    def _begin(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x))


class Nested(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))


def test_calls_stand_before_or_behind_the_blocks() -> None:
    assert called_before(Model, "blocks") == {"first": True, "norm": True, "last": False, "head": False}
    assert called_before(Nested, "blocks") == {"first": True, "last": False}


def test_nothing_is_known_of_classes_that_do_not_use_the_blocks() -> None:
    assert called_before(Model, "layers") == {}
    assert called_before(nn.Sequential, "0") == {}
