"""`rank_variables`: the environment variables that make a process a rank."""

from __future__ import annotations

from ...strategies.distributed import rendezvous


def rank_variables(
    address: str, port: int, *, local_rank: int, num_processes: int, node_rank: int, num_nodes: int
) -> dict[str, str]:
    """Return the variables of a process that a launcher of ours starts, with the names that torchrun uses.

    Args:
        address: Address of rank 0.
        port: Port of the store, which the launching process of the first node hosts.
        local_rank: Rank among the processes of this node.
        num_processes: Number of processes per node.
        node_rank: Rank of this node.
        num_nodes: Number of nodes.
    """
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "NODE_RANK": str(node_rank),
        "LOCAL_RANK": str(local_rank),
        "RANK": str(node_rank * num_processes + local_rank),
        "WORLD_SIZE": str(num_processes * num_nodes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        rendezvous.HOSTED: "hosted",
    }
