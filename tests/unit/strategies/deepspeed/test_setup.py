"""What DeepSpeed cannot train is refused when a module is checked."""

from __future__ import annotations

import pytest
from torch import nn

from loopwright.errors import ModuleError
from loopwright.strategies.deepspeed.setup import check_layers


def test_a_pipeline_module_is_refused_with_the_mesh_as_remedy() -> None:
    kind = type("PipelineModule", (nn.Module,), {"__module__": "deepspeed.runtime.pipe.module"})
    module = nn.Module()
    module.add_module("pipe", kind())
    with pytest.raises(ModuleError, match=r"got DeepSpeed's PipelineModule at pipe[\s\S]*mesh:pp=2"):
        check_layers(module)
