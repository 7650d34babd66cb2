"""What XLA strategies do beside training: where tensors lie, collectives, loaders, the profiler, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import run_task


def test_parameters_and_their_moments_are_sharded_also_after_loading(tmp_path: Path) -> None:
    found = run_task(tmp_path, "shards", 4)
    cut = {name: spec for name, spec in found["parameters"].items() if "devices=" in spec}
    assert cut["first.weight"] == "{devices=[4,1]0,1,2,3}"
    assert cut["head.weight"] == "{devices=[1,4]0,1,2,3}"
    assert set(found["parameters"]) - set(cut) == {"head.bias"}  # 3 elements for 4 devices
    assert found["moments"] == found["parameters"]
    assert found["part"] == (2, 6)
    assert found["tied"]
    assert found["compiled_to_save"] == 0
    assert found["same"]
    # Each device is sent its part, and all of what is whole everywhere: a model that fits no device can be loaded. The
    # last part of a length that 4 does not divide is padded.
    assert found["sent_to_load"] < 1.5 * sum(found["sizes"].values())


@pytest.mark.parametrize(("devices", "name"), [(1, "single_xla"), (2, "xla"), (2, "xla_fsdp")])
def test_collectives_loaders_and_profiler(devices: int, name: str, tmp_path: Path) -> None:
    found = run_task(tmp_path, "parts", devices, name)
    assert found["reduced"] == found["gathered"] == [0.0, 1.0, 2.0, 3.0]  # one rank, whatever the number of devices
    assert found["sent"] == {"a": 1}
    assert found["decision"]
    if devices == 1:
        assert found["cut"] == ["", "", ""]
    else:
        assert found["cut"][:2] == ["{devices=[2,1,1]0,1}", "{devices=[2]0,1}"]
        assert "devices=" not in found["cut"][2]
    assert "devices=" not in found["uneven"][0]
    assert found["uneven"][1] == 42.0
    assert [value for value, _ in found["ahead"]] == found["ours"] == [120.0, 376.0]
    assert all(("devices=" in spec) == (devices > 1) for _, spec in found["ahead"])
    assert found["traced"] == [b"run_training_step", b"backward", b"validation_step"]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    found = run_task(tmp_path, "refusals", 2)
    for message, part in zip(
        found,
        [
            "requests 3 xla devices, but this machine has 2",
            "Expected an XLA strategy for accelerator='xla' (or 'tpu'), got strategy='single_device'.",
            "Expected an XLA strategy for accelerator='xla' (or 'tpu'), got strategy='ddp'.",
            "strategy='xla' cannot be used with accelerator='cpu'",
            "precision='16-mixed' cannot be used with strategy='xla_fsdp'",
            "Expected num_nodes=1 with strategy='xla', which runs one process on one machine, got num_nodes=2",
        ],
        strict=True,
    ):
        assert part in message
