"""`Experts`: a layer in which a router chooses, for each token, a few of many small networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ....errors import ConfigError
from ....protocols import StateDict
from .permute import permute
from .weights import ExpertWeights

# Any in this file: a module's state as copy and pickle take it.


class Experts(nn.Module):
    """Mixture of experts: each token goes through the `top_k` of `num_experts` networks that a router chooses.

    For a token x and its chosen experts e, with probabilities p = softmax(router(x)):

        y = sum over e of p[e] * down[e](activation(up[e](x)))
        y = sum over e of p[e] * down[e](activation(gate[e](x)) * up[e](x))    if `gated`

    No token is dropped, and an expert may get none. The order of all sums is fixed, so that results are reproducible.
    Under `MeshStrategy(ep=N)`, each of N processes holds the weights of `num_experts / N` experts, and tokens are sent
    to them and back. Names and shapes of the parameters do not depend on N, so that checkpoints load everywhere.

    Input and output have the shape (..., dim) and the same dtype.

    Args:
        dim: Width of a token.
        hidden: Width within an expert.
        num_experts: Number of experts.
        top_k: Number of experts for each token.
        activation: Element-wise function between the two products of an expert.
        gated: Whether an expert has a third product, to which the activation is applied, as in SwiGLU.
        normalize: Whether the weights of a token's experts are divided by their sum.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        router: Linear layer whose weight has the shape (num_experts, dim).
        experts: The weights: `up` and, if `gated`, `gate`, of shape (num_experts, dim, hidden); `down`, of shape
            (num_experts, hidden, dim).
        balance_loss: After a forward pass: num_experts * sum over experts of (share of assignments) * (mean
            probability), over the tokens of this pass on this rank, or of the sequences that it shares with others;
            shape (), float32 or wider, with a graph. It is 1 if tokens are distributed evenly. To balance the router,
            add it to the loss with a factor of about 0.01. None before the first pass, in a copy, and after loading by
            pickle.
        tokens_per_expert: After a forward pass: number of assignments to each expert, of the same tokens; shape
            (num_experts,), int64. None if `balance_loss` is None.

    Raises:
        ConfigError: A size is not positive, or `top_k` is larger than `num_experts`; every problem is named.

    Source: Shazeer et al. 2017 (routing); Fedus et al. 2022, eq. 4 (balance loss, here with shares of all `top_k`
        assignments).
    """

    balance_loss: Tensor | None
    tokens_per_expert: Tensor | None
    add_parts: Callable[[Tensor], Tensor] | None = None
    """Where ranks share sequences: adds a tensor over their parts, with gradients. Set by the strategy."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        *,
        activation: Callable[[Tensor], Tensor] = nn.functional.gelu,
        gated: bool = False,
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check({"dim": dim, "hidden": hidden, "num_experts": num_experts, "top_k": top_k})
        self.dim = dim
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize = normalize
        self.router = nn.Linear(dim, num_experts, bias=False, device=device, dtype=dtype)
        self.experts = ExpertWeights(
            dim, hidden, num_experts, activation=activation, gated=gated, device=device, dtype=dtype
        )
        self.balance_loss = None
        self.tokens_per_expert = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the chosen experts' outputs for each token: (..., dim), in the dtype of `x`.

        If the experts are sharded, call it on all ranks that share them: it communicates.
        """
        tokens = x.reshape(-1, self.dim)
        logits = self.router(tokens)
        probabilities = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        ranked, order = chosen.flatten().sort(stable=True)  # by expert, and by token within one
        edges = torch.searchsorted(ranked, torch.arange(self.num_experts + 1, device=ranked.device))
        counts = edges.diff()
        self._lw_keep(probabilities, counts)
        copies = tokens.unsqueeze(1).expand(-1, self.top_k, -1).reshape(-1, self.dim)
        outputs = permute(self.experts(permute(copies, order), counts), order.argsort())
        y: Tensor = (outputs.view(-1, self.top_k, self.dim) * weights.unsqueeze(-1)).sum(1)
        return y.to(x.dtype).view(x.shape)

    def extra_repr(self) -> str:
        """Return the sizes for `repr`."""
        return f"num_experts={self.num_experts}, top_k={self.top_k}, normalize={self.normalize}"

    def _lw_keep(self, probabilities: Tensor, counts: Tensor) -> None:
        total = probabilities.sum(0)
        if self.add_parts is not None:
            total, counts = self.add_parts(total), self.add_parts(counts)
        num_assignments = counts.sum()
        share = counts / num_assignments.clamp(min=1)
        mean = total / (num_assignments // self.top_k).clamp(min=1)
        self.balance_loss = (share.to(mean.dtype) * mean).sum() * self.num_experts
        self.tokens_per_expert = counts

    def __getstate__(self) -> StateDict:
        # Neither a tensor with a graph nor a process group can be copied or pickled.
        return {**self.__dict__, "balance_loss": None, "tokens_per_expert": None, "add_parts": None}


def _check(sizes: dict[str, int]) -> None:
    wrong = [f"{name}={size!r}" for name, size in sizes.items() if type(size) is not int or size < 1]
    if wrong:
        raise ConfigError(f"Expected positive sizes of Experts, got {', '.join(wrong)}.", fix="pass positive integers.")
    if sizes["top_k"] > sizes["num_experts"]:
        raise ConfigError(
            f"Expected top_k of Experts to be at most num_experts={sizes['num_experts']}, got {sizes['top_k']}.",
            fix="pass a smaller top_k, or more experts.",
        )
