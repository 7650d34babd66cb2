"""The machines of a SageMaker training job, which its containers' variables name."""

from __future__ import annotations

import json
from collections.abc import Mapping

_PORT = "29400"


def sagemaker_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return NNODES, NODE_RANK, MASTER_ADDR and MASTER_PORT of a SageMaker job; empty outside of one of several hosts.

    SM_HOSTS is the list of hosts, SM_CURRENT_HOST this one. Their order may differ between hosts, so they are sorted.
    """
    try:
        hosts = sorted(map(str, json.loads(variables.get("SM_HOSTS", "[]"))))
    except (ValueError, TypeError):
        return {}
    current = variables.get("SM_CURRENT_HOST")
    if len(hosts) < 2 or current not in hosts:
        return {}
    return {
        "NNODES": str(len(hosts)),
        "NODE_RANK": str(hosts.index(current)),
        "MASTER_ADDR": hosts[0],
        "MASTER_PORT": variables.get("MASTER_PORT") or _PORT,
    }
