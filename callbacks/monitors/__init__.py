"""Callbacks that measure and log: learning rates, devices, throughput, weights, samples, spikes."""

from __future__ import annotations

__all__: list[str] = []
