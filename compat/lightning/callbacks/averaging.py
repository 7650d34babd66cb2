"""What subclasses of Lightning's averaging callbacks read beside their public names."""

from __future__ import annotations

from ....callbacks import StochasticWeightAveraging

__all__: list[str] = []

StochasticWeightAveraging._initialized = property(  # type: ignore[attr-defined]
    lambda callback: callback._began_at >= 0
)
