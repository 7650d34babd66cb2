"""`ModelSettings` and `LoraSettings`: what model a recipe trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"  # NAME.json: configurations that need no download
DTYPES = ("float32", "bfloat16", "float16", "float64")
QUANTIZATIONS = ("nf4",)


@dataclass(frozen=True)
class LoraSettings:
    """Settings of LoRA.

    Args:
        r: Rank of the adapters.
        alpha: Their outputs are multiplied by `alpha / r`.
        dropout: Share of the inputs of adapters that are set to zero in training.
        targets: Layers that get an adapter: ends of their names, or one regular expression for entire names.
            "all-linear" is every linear layer but the output layer.
        dora: Whether adapters learn the magnitudes of weights separately (DoRA).
    """

    r: int = 16
    alpha: float = 32
    dropout: float = 0.0
    targets: str | Sequence[str] = "all-linear"
    dora: bool = False


@dataclass(frozen=True)
class ModelSettings:
    """What model a recipe trains.

    Args:
        model: Hugging Face or LitGPT folder with weights; with `from_scratch`, a config.json, a folder with one, or one
            of `shipped_names`.
        from_scratch: Whether initial values are random, drawn by `seed`.
        lora: Settings of adapters; None trains all parameters.
        quantize: "nf4" for a base of 4 bits; None for none.
        dtype: Dtype of the base's parameters, such as "bfloat16"; with `quantize`, of what is computed with them. None:
            float32 for those that are trained, the folder's for a frozen base.
        gradient_checkpointing: Whether blocks are computed again in the backward pass instead of keeping activations.
        router_aux_loss_coef: Factor of the loss by which a model with experts uses all of them; None for what its
            configuration asks for, 0 for the cross entropy alone.
        trust_remote_code: Whether code in the folder may run.
        allow_download: Whether `model` may be the name of a model on the hub.
        seed: Seed of random initial values, those of adapters as well.
        needs_weights: Whether a folder without weights is refused; sizes need its configuration only.
    """

    model: Path
    from_scratch: bool = False
    lora: LoraSettings | None = None
    quantize: str | None = None
    dtype: str | None = None
    gradient_checkpointing: bool = False
    router_aux_loss_coef: float | None = None
    trust_remote_code: bool = False
    allow_download: bool = False
    seed: int = 0
    needs_weights: bool = True

    @property
    def location(self) -> str:
        """The path, with the home folder filled in; or the name on the hub."""
        return str(self.model) if self.allow_download and not self.path.exists() else str(self.path)

    @property
    def path(self) -> Path:
        """The path, with the home folder filled in; of a shipped configuration where there is nothing."""
        path = Path(self.model).expanduser()
        shipped = CONFIGS / f"{str(self.model).lower()}.json"
        return shipped if not path.exists() and str(self.model).lower() in shipped_names() else path


def shipped_names() -> list[str]:
    """Return the models whose configurations come with the package, without weights or tokenizer."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))
