"""Links of a machine: what nvidia-smi and /sys print."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopwright.doctor.links import Links, read_ethernet, read_infiniband, read_topology
from loopwright.doctor.ranks import advise_mesh, least_bandwidth

_ALL_BY_NVLINK = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-47\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNODE\t0-47\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tSYS\t48-95\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def test_links_of_gpus_are_read_pair_by_pair() -> None:
    assert read_topology(_ALL_BY_NVLINK) == {"0-1": "NV18", "0-2": "NV18", "1-2": "NV18"}
    by_pcie = _ALL_BY_NVLINK.replace("GPU0\t X \tNV18\tNV18", "GPU0\t X \tNV18\tSYS")
    assert read_topology(by_pcie) == {"0-1": "NV18", "0-2": "SYS", "1-2": "NV18"}
    assert read_topology("") == {}
    assert read_topology("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == {}
    assert read_topology("\tNIC0\tGPU0\tGPU1\nNIC0\t X \tPXB\tPXB\nGPU0\tPXB\t X \tNV4\nGPU1\tPXB\tNV4\t X \n") == {
        "0-1": "NV4"
    }


def test_ports_of_infiniband_and_roce_are_read_where_they_are_active(tmp_path: Path) -> None:
    for card, port, state, rate, layer in (
        ("mlx5_0", "1", "4: ACTIVE", "400 Gb/sec (4X NDR)", "InfiniBand"),
        ("mlx5_1", "1", "1: DOWN", "10 Gb/sec (4X SDR)", "InfiniBand"),
        ("mlx5_2", "2", "4: ACTIVE", "100 Gb/sec (4X EDR)", "Ethernet"),
    ):
        folder = tmp_path / "infiniband" / card / "ports" / port
        folder.mkdir(parents=True)
        for name, text in (("state", state), ("rate", rate), ("link_layer", layer)):
            (folder / name).write_text(f"{text}\n")
    assert read_infiniband(tmp_path) == {"mlx5_0 (InfiniBand)": 400.0, "mlx5_2 port 2 (RoCE)": 100.0}


def test_interfaces_without_a_device_or_a_cable_are_left_out(tmp_path: Path) -> None:
    for name, is_physical, state, speed in (
        ("eth0", True, "up", "25000"),
        ("eth1", True, "up", "-1"),
        ("eth2", True, "down", "1000"),
        ("docker0", False, "up", "10000"),
    ):
        folder = tmp_path / "net" / name
        (folder / "device" if is_physical else folder).mkdir(parents=True)
        (folder / "operstate").write_text(f"{state}\n")
        (folder / "speed").write_text(f"{speed}\n")
    assert read_ethernet(tmp_path) == {"eth0": 25.0, "eth1": 0.0}


def test_a_line_names_all_links() -> None:
    links = Links({"0-1": "NV4"}, {"mlx5_0 (InfiniBand)": 200.0}, {"eth0": 25.0, "eth1": 0.0})
    assert links.describe() == (
        "GPUs joined by NV4, mlx5_0 (InfiniBand) 200 Gb/s, eth0 (Ethernet) 25 Gb/s, eth1 (Ethernet) at an unknown rate"
    )
    assert Links({}, {}, {}).describe().startswith("no GPUs")


_NVLINK = Links({"0-1": "NV18"}, {"mlx5_0 (InfiniBand)": 400.0, "mlx5_1 (InfiniBand)": 400.0}, {"eth0": 25.0})
_PCIE = Links({"0-1": "SYS"}, {}, {"eth0": 25.0})
_CPU = Links({}, {}, {"eth0": 0.0})


@pytest.mark.parametrize(
    ("links", "counts", "words"),
    [
        ([_NVLINK], [8], "tp of up to 8"),
        ([_NVLINK, _NVLINK], [8, 8], "(800 Gb/s): fsdp or dp over all of them"),
        ([_NVLINK, _PCIE], [8, 8], "NVLink does not join all GPUs"),
        ([_PCIE, _PCIE], [4, 4], "(25 Gb/s): fsdp within a machine and copies between them"),
        ([_PCIE, _PCIE], [4, 4], "mesh:dp=2,fsdp=4"),
        ([_CPU, _CPU], [1, 1], "(unknown rate): ddp with accumulation"),
    ],
)
def test_the_links_say_which_mesh_fits(links: list[Links], counts: list[int], words: str) -> None:
    assert words in advise_mesh(links, counts).value


def test_a_bandwidth_is_compared_with_the_slowest_link_where_it_is_known() -> None:
    assert least_bandwidth("nccl", [_NVLINK, _NVLINK]) == 800e9 / 8 / 3
    assert least_bandwidth("nccl", [_NVLINK, _PCIE]) == 25e9 / 8 / 3
    assert least_bandwidth("gloo", [_NVLINK, _NVLINK]) == 10e9 / 8 / 3
    assert least_bandwidth("nccl", [_NVLINK]) > least_bandwidth("nccl", [_PCIE]) > 0
    assert least_bandwidth("gloo", [_NVLINK]) == least_bandwidth("nccl", [_CPU, _CPU]) == 0
