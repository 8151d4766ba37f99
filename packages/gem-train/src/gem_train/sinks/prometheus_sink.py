"""A Prometheus endpoint: `prometheus` or `prometheus:PORT` (9400); http://host:PORT/metrics has the latest figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gem_train.config import RunConfig
from gem_train.run_dir import RunDir
from gem_train.sinks import Sink, client

PORT = 9400


class Prometheus:
    """Gauges gem_<kind>_<name>{run="..."} and gem_<kind>{run="..."}, the step that they are of."""

    def __init__(self, run: RunDir, port: int) -> None:
        self._client = client("prometheus_client")
        self._registry: Any = self._client.CollectorRegistry()
        self._run = run.path.name
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = self._client.start_http_server(port, registry=self._registry)
        except OSError as error:
            raise ValueError(f"port {port} is not to be had: {error.strerror}") from error
        self.port = self._server.server_port

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Set every gauge."""
        for name, value in {**{f"{kind}_{n}": v for n, v in values.items()}, f"{kind}_number": float(step)}.items():
            key = "gem_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            if key not in self._gauges:
                self._gauges[key] = self._client.Gauge(key, f"gem-train: {name}", ["run"], registry=self._registry)
            self._gauges[key].labels(run=self._run).set(value)

    def close(self) -> None:
        """Give the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def make(run: RunDir, config: RunConfig, argument: str) -> Sink:
    """The sink; its argument is the port, 0 for any that is free."""
    if argument and not argument.isdigit():
        raise ValueError(f"expected a port, got {argument!r}")
    return Prometheus(run, int(argument) if argument else PORT)
