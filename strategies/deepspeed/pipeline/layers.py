"""The first values of a PipelineModule's layers: those of building all of them in one process, whatever the stages are.

DeepSpeed (0.19) builds the layers of a rank's own stage only, so that each stage would draw the same random numbers,
and counts parameters by building all layers before.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["build_in_order"]

# Any in this file: deepspeed has no types.


def build_in_order() -> None:
    """Let every PipelineModule of this process, from now on, be built as `nn.Sequential` of the same layers would be.

    A rank builds the layers of other stages as well, one at a time, and lets each go at once.
    """
    from deepspeed.runtime.pipe.module import PipelineModule

    build, choose = PipelineModule._build, PipelineModule._partition_layers
    if hasattr(build, "__wrapped__"):
        return

    @functools.wraps(choose)
    def _partition_layers(self: Any, *args: Any, **kwargs: Any) -> Any:
        devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices):
            return choose(self, *args, **kwargs)

    @functools.wraps(build)
    def _build(self: Any) -> None:
        if self.seed_layers:  # each layer has a seed of its own
            build(self)
            return
        with _built(self._layer_specs, range(self._local_start, self._local_stop)):
            build(self)

    PipelineModule._build, PipelineModule._partition_layers = _build, _partition_layers


@contextmanager
def _built(specs: list[Any], own: range) -> Iterator[None]:
    """Build all layers in order, and let those of the own stage be what their specs then return."""
    from deepspeed.runtime.pipe.module import LayerSpec, TiedLayerSpec

    ready: dict[int, nn.Module] = {}  # by place
    tied: set[str] = set()
    for number, spec in enumerate(specs):
        if not isinstance(spec, LayerSpec):
            continue
        places = [number]
        if isinstance(spec, TiedLayerSpec):
            if spec.key in tied:
                continue
            tied.add(spec.key)
            # A stage asks the first of its own specs with this key.
            places = [at for at in own if isinstance(specs[at], TiedLayerSpec) and specs[at].key == spec.key][:1]
        layer = spec.build()
        ready.update((at, layer) for at in places if at in own)
        del layer
    queues: dict[int, deque[nn.Module]] = {}
    for at in sorted(ready):
        queues.setdefault(id(specs[at]), deque()).append(ready[at])  # a spec may stand in several places
    asked = {id(spec): spec for spec in specs if id(spec) in queues}
    for key, spec in asked.items():
        spec.build = lambda log=False, queue=queues[key]: queue.popleft()
    try:
        yield
    finally:
        for spec in asked.values():
            del spec.build
