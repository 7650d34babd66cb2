"""PrometheusLogger: the latest value of each metric, at an HTTP address of this process that Prometheus reads."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .base import Metrics, Params, RunLogger, scalars
from .service import require_package

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from prometheus_client import CollectorRegistry, Metric

    from ..protocols import StateDict

_INVALID = re.compile(r"[^a-zA-Z0-9_:]")


class PrometheusLogger(RunLogger):
    """Serve the latest value of each metric, step, epoch and samples as gauges, for Prometheus to read.

    The endpoint opens on rank zero when fit begins, or with the first record, and closes with fit, validate, test or
    predict. It only answers requests: nothing is sent, and no device is read for it. It has no password and no
    encryption, and therefore is reachable from this machine only, unless `address` says otherwise. Hyperparameters
    are not served.

    The metric `val/loss` is the gauge `loopwright_val_loss`: characters that Prometheus does not have become "_", and
    the label `name` keeps the logged name. Earlier values are Prometheus's to store; a resumed run needs no state.

    Args:
        port: TCP port; 0 takes a free one, which `url` shows.
        address: Address of this machine on which to listen: a loopback address, or for other machines the address of
            a network interface; "0.0.0.0" means all of them.
        prefix: Text before each gauge's name, joined by "_".

    Raises:
        ConfigError: An argument is invalid.
        MissingDependency: prometheus_client is not installed.
    """

    _experiment: CollectorRegistry | None

    def __init__(self, port: int = 9464, address: str = "127.0.0.1", *, prefix: str = "loopwright") -> None:
        wrong = []
        if not isinstance(port, int) or isinstance(port, bool) or not 0 <= port <= 65535:
            wrong.append(f"port={port!r}; expected an integer from 0 to 65535")
        if not isinstance(address, str) or not address:
            wrong.append(f"address={address!r}; expected an address of this machine, such as '127.0.0.1'")
        if not isinstance(prefix, str) or _INVALID.search(prefix) or prefix[:1].isdigit():
            wrong.append(f"prefix={prefix!r}; expected letters, digits, '_' and ':', without a digit first")
        if wrong:
            raise ConfigError(f"PrometheusLogger got {'; '.join(wrong)}.", fix="change these arguments.")
        require_package(
            "prometheus_client", package="prometheus_client", needed_for="PrometheusLogger", extra="prometheus"
        )
        super().__init__(prefix)
        self._lw_port = port
        self._lw_address = address
        self._lw_latest: dict[str, float] = {}
        self._lw_server: tuple[WSGIServer, Thread] | None = None

    def __getstate__(self) -> dict[str, object]:
        """Leave the endpoint out: the process that unpickles opens it."""
        return {**super().__getstate__(), "_lw_server": None, "_experiment": None}

    @property
    def name(self) -> None:
        """None: runs are not grouped."""
        return

    @property
    def version(self) -> None:
        """None: runs have no id."""
        return

    @property
    def url(self) -> str | None:
        """The address that Prometheus reads; None while it is closed."""
        if self._lw_server is None:
            return None
        host = f"[{self._lw_address}]" if ":" in self._lw_address else self._lw_address
        return f"http://{host}:{self._lw_server[0].server_port}/metrics"

    @property
    def experiment(self) -> CollectorRegistry:
        """The `prometheus_client.CollectorRegistry`, for further metrics; the first call opens the endpoint."""
        return self._lw_opened(self._lw_open)

    def check_target(self) -> None:
        """Open the endpoint, before training starts.

        Raises:
            ConfigError: The port is in use, or the address is not one of this machine.
        """
        self._lw_opened(self._lw_open)

    def log_metrics(self, metrics: Metrics, step: int | None = None) -> None:
        """Serve these values from now on; other metrics keep theirs.

        Args:
            metrics: Name -> number (or a tensor of one element, which is copied to the host).
            step: Value of the gauge `loopwright_step`. None is the last one plus one.

        Raises:
            ConfigError: A value is not a number; the message names its key. No value changes.
        """
        if self.is_silent:
            return
        self.check_target()
        with self._lw_lock:
            values = scalars(metrics)
            self._lw_step = self._lw_step + 1 if step is None else int(step)
            # A new dict: the thread that answers a request may be reading the other one.
            self._lw_latest = {**self._lw_latest, **values, "step": self._lw_step}

    def log_row(self, metrics: Metrics, step: int, axes: Mapping[str, float]) -> None:
        """Serve the values of one row of the Trainer, and the number of samples."""
        self.log_metrics({"samples": axes.get("samples", 0), **metrics}, step)

    def log_hyperparams(self, params: Params, *args: Any, **kwargs: Any) -> None:
        """Do nothing: gauges are numbers."""
        return

    def finalize(self, status: str) -> None:
        """Close the endpoint; a later record opens it again.

        Args:
            status: "success", "finished" or "failed".
        """
        if self.is_silent:
            return
        with self._lw_lock:
            server, self._lw_server, self._experiment = self._lw_server, None, None
            if server is not None:
                with contextlib.suppress(OSError):  # not every system does this to a socket that listens
                    # Workers of a loader, which were forked meanwhile, have copies that would hold the port.
                    server[0].socket.shutdown(socket.SHUT_RDWR)
                server[0].shutdown()
                server[0].server_close()
                server[1].join()
            self._lw_end_session()

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; called by prometheus_client for each request, on another thread."""
        from prometheus_client import Metric

        gauges: dict[str, Metric] = {}
        for logged, value in self._lw_latest.items():
            name = _INVALID.sub("_", f"{self._prefix}_{logged}" if self._prefix else logged)
            name = f"_{name}" if not name or name[0].isdigit() else name
            gauge = gauges.setdefault(name, Metric(name, "Latest value that was logged.", "gauge"))
            shown = logged.encode("utf-8", "replace").decode()  # a lone surrogate has no encoding
            gauge.add_sample(name, {"name": shown} if _INVALID.search(logged) else {}, value)
        yield from gauges.values()

    def state_dict(self) -> StateDict:
        """Return nothing: a resumed run serves its first row as it comes."""
        return {}

    def _lw_open(self) -> CollectorRegistry:
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._lw_server = start_http_server(self._lw_port, self._lw_address, registry)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"PrometheusLogger cannot listen on port {self._lw_port} of {self._lw_address!r}: {error}.",
                fix="pass another port, or port=0 for a free one (the logger's url shows it), and an address of this "
                "machine.",
            ) from error
        return registry
