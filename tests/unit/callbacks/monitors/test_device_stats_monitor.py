"""DeviceStatsMonitor: statistics before and after logged steps, under the step's own number."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from toys import Net, RecordingLogger, ValidatedNet, loader, net, quiet

from loopwright.callbacks import DeviceStatsMonitor
from loopwright.callbacks.monitors import network_rates
from loopwright.errors import ConfigError, MissingDependency

pytest.importorskip("psutil")


def fit(monitor: DeviceStatsMonitor, kind: type[Net] = Net, **kwargs: Any) -> tuple[Any, RecordingLogger]:
    logger = RecordingLogger()
    trainer = quiet(logger=logger, callbacks=[monitor], **{"max_epochs": 1, "log_every_n_steps": 2, **kwargs})
    trainer.fit(net(kind), loader(12, 2), loader(8, 2) if kind is ValidatedNet else None)
    return trainer, logger


def test_logged_steps_have_statistics_of_their_start_and_end() -> None:
    _, logger = fit(DeviceStatsMonitor())
    for name in ("cpu_percent", "cpu_vm_percent", "cpu_swap_percent"):
        for hook in ("on_train_batch_start", "on_train_batch_end"):
            values = logger.values(f"DeviceStatsMonitor.{hook}/{name}")
            assert [step for step, _ in values] == [1, 3, 5]
            assert all(0 <= value <= 100 for _, value in values)


def test_accumulated_steps_are_one_point_each() -> None:
    _, logger = fit(DeviceStatsMonitor(), log_every_n_steps=1, accumulate_grad_batches=3)
    assert [step for step, _ in logger.values("DeviceStatsMonitor.on_train_batch_start/cpu_percent")] == [0, 1]


def test_evaluations_are_logged_by_their_batches() -> None:
    trainer, logger = fit(DeviceStatsMonitor(), ValidatedNet)
    assert [step for step, _ in logger.values("DeviceStatsMonitor.on_validation_batch_end/cpu_percent")] == [1, 3]
    trainer.test(net(ValidatedNet), loader(4, 2), verbose=False)
    assert len(logger.values("DeviceStatsMonitor.on_test_batch_start/cpu_percent")) == 1


def test_none_are_logged_where_they_are_not_wanted() -> None:
    _, logger = fit(DeviceStatsMonitor(cpu_stats=False))
    assert not logger.rows


def test_a_card_has_the_processors_statistics_only_on_demand(monkeypatch: Any) -> None:
    import torch

    from loopwright.accelerators import CPUAccelerator

    monkeypatch.setattr(CPUAccelerator, "get_device_stats",
                        lambda self, device: {"cpu": 1.0} if device.type == "cpu" else {"card": 2.0})  # fmt: skip

    class OnCard:
        device = torch.device("cuda", 0)

    class FakeTrainer:
        fabric, accelerator, logger = OnCard(), CPUAccelerator(), RecordingLogger()

    expected = {None: {"card"}, True: {"card", "cpu"}, False: {"card"}}
    for wanted, names in expected.items():
        stats = DeviceStatsMonitor(wanted)._lw_read(FakeTrainer(), "here")  # type: ignore[arg-type]
        assert {name.split("/")[1] for name in stats} == names


def test_a_missing_logger_or_package_is_an_error_before_training(monkeypatch: Any) -> None:
    with pytest.raises(ConfigError, match="DeviceStatsMonitor has no logger"):
        quiet(callbacks=[DeviceStatsMonitor()], max_epochs=1).fit(net(), loader())
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(MissingDependency, match="psutil"):
        fit(DeviceStatsMonitor())


def test_the_network_is_logged_on_demand(monkeypatch: Any) -> None:
    sent = iter(range(0, 10**6, 1000))
    monkeypatch.setattr(network_rates, "_of_interfaces", lambda: {"network_sent": next(sent), "network_received": 5})
    clock = iter(range(10**6))
    monkeypatch.setattr(network_rates, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    _, logger = fit(DeviceStatsMonitor(network_stats=True))
    for hook in ("on_train_batch_start", "on_train_batch_end"):
        rates = logger.values(f"DeviceStatsMonitor.{hook}/network_sent_bytes_per_sec")
        assert rates == [(1, 1000.0), (3, 1000.0), (5, 1000.0)]
        assert logger.values(f"DeviceStatsMonitor.{hook}/network_received_bytes_per_sec")[0] == (1, 0.0)


def test_rates_are_of_all_interfaces_but_loopback_and_of_infiniband_cards(tmp_path: Any, monkeypatch: Any) -> None:
    import psutil

    def count(sent: int) -> Any:
        return SimpleNamespace(bytes_sent=sent, bytes_recv=2 * sent)

    counters = {"lo": count(10**9), "eth0": count(100), "eth1": count(1000)}
    monkeypatch.setattr(psutil, "net_io_counters", lambda pernic: counters)
    ports = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1" / "counters"
    ports.mkdir(parents=True)
    (ports / "port_xmit_data").write_text("100\n")
    (ports / "port_rcv_data").write_text("1000\n")
    clock = iter([10.0, 12.0, 13.0])
    monkeypatch.setattr(network_rates, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    rates = network_rates.NetworkRates(tmp_path)
    assert rates.read() == {}
    counters = {"lo": count(10**10), "eth0": count(300), "eth1": count(1500)}
    (ports / "port_xmit_data").write_text("600\n")
    assert rates.read() == {
        "network_sent_bytes_per_sec": 350.0,
        "network_received_bytes_per_sec": 700.0,
        "infiniband_sent_bytes_per_sec": 1000.0,
        "infiniband_received_bytes_per_sec": 0.0,
    }
    counters = {"eth0": count(300)}  # an interface has gone: its counts are missing, and no rate is negative
    assert set(rates.read()) == {"infiniband_sent_bytes_per_sec", "infiniband_received_bytes_per_sec"}
