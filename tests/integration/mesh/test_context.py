"""Sequences that several ranks share: the same training as on one process, in float64."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from context_models import Counting, Language, Positioned, Sentences, Summed, fit, full
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import loopwright as lw
from loopwright.errors import ModuleError
from loopwright.strategies import MeshStrategy
from loopwright.strategies.mesh.context import Context
from loopwright.strategies.mesh.context.parallel import share_sequences

# Any in this file: results that travel between processes.

BATCH = {"tokens": 1, "following": 1}


def make(kind: type[Language], model: type[Positioned] = Positioned) -> Language:
    torch.manual_seed(0)
    return kind(model())


def train(rank: int, size: int, kind: type[Language], **axes: Any) -> dict[str, Any]:
    module = make(kind)
    trainer = fit(module, size, MeshStrategy(**axes), batch_size=4 * axes["cp"] // size)
    state: dict[str, Tensor] = {name: full(one) for name, one in module.named_parameters()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"state": state, "losses": module.losses, "metrics": metrics, "share": trainer.strategy.topology.data_rank}


def alone(kind: type[Language]) -> dict[str, Any]:
    module = make(kind)
    trainer = fit(module, 1, "auto", batch_size=4)
    state = {name: full(one) for name, one in module.named_parameters()}
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"state": state, "losses": module.losses, "metrics": metrics}


def assert_equal(everywhere: list[dict[str, Any]], wanted: dict[str, Any], shares: int, parts: int = 1) -> None:
    """Compare weights, losses and metrics; a loss is the mean over shares of the data, or the sum over parts."""
    for found in everywhere:
        for name, value in wanted["state"].items():
            assert (found["state"][name] - value).abs().max() <= 1e-12, name
        assert found["metrics"].keys() == wanted["metrics"].keys()
        for name, value in wanted["metrics"].items():
            assert abs(found["metrics"][name] - value) <= 1e-13, name
    of_steps = zip(*(found["losses"] for found in everywhere), strict=True)
    for losses, value in zip(of_steps, wanted["losses"], strict=True):
        mean = sum(losses) / len(losses) if parts == 1 else sum(losses)
        assert abs(mean - value) <= 1e-13 * max(1.0, abs(value))
    assert {found["share"] for found in everywhere} == set(range(shares))


@pytest.mark.parametrize("method", ["gather", "ulysses"])
@pytest.mark.parametrize(("size", "cp"), [(2, 2), (4, 4), (4, 2)], ids=["cp2", "cp4", "cp2 x fsdp2"])
def test_training_is_that_of_one_process(method: str, size: int, cp: int) -> None:
    found = run_ranks(train, size, Language, cp=cp, context=Context(method=method), connect=False)
    assert_equal(found, alone(Language), size // cp)


@pytest.mark.parametrize(("size", "cp"), [(2, 2), (4, 2)], ids=["cp2", "cp2 x fsdp2"])
def test_a_split_batch_with_sums_is_that_of_one_process(size: int, cp: int) -> None:
    found = run_ranks(train, size, Summed, cp=cp, context=Context(batch=BATCH), connect=False)
    assert_equal(found, alone(Summed), size // cp, parts=cp)


class Whole(Language):
    """Passes a mask to the model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mask = torch.ones(batch["tokens"].shape, dtype=torch.bool)
        return self.model(batch["tokens"], attention_mask=mask).sum()


class Masked(Positioned):
    """Attends with a mask that its caller gives, or one of its own."""

    def forward(self, indices: Tensor, attention_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        length = indices.shape[1]
        x = self.tok(indices)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        return self.head(F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], attn_mask=mask)[:, 0])


class ByProducts(Positioned):
    """Computes attention by matrix products."""

    def forward(self, indices: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.tok(indices)
        return self.head(torch.softmax(x @ x.mT, -1) @ x)


class Averaging(Positioned):
    """Subtracts the mean over the sequence after the blocks."""

    def forward(self, indices: Tensor, position_ids: Tensor | None = None) -> Tensor:
        logits = super().forward(indices, position_ids)
        return logits - logits.mean(1, keepdim=True)


class Norm(nn.Module):
    """Keeps a mean of what it gets, as batch norms do, of which evaluation shows nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = x.detach().mean((0, 1))
        return x - self.mean


class Remembering(Positioned):
    """Ends with a norm that has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(self.tok.embedding_dim)


class Multihead(Positioned):
    """Uses torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.multihead = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, indices: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.tok(indices)
        return self.head(self.multihead(x, x, x, need_weights=False)[0])


class Pooled(Positioned):
    """Returns one value for a sequence."""

    def forward(self, indices: Tensor, position_ids: Tensor | None = None) -> Tensor:
        return super().forward(indices, position_ids).mean(1)


class Shifting(Summed):
    """Shifts labels in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch["tokens"])[:, :-1]
        labels = batch["tokens"][:, 1:]
        return lw.Loss(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel())


class Bypassing(Language):
    """Does not call the model as a module."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model.forward(batch["tokens"]).mean()


ULYSSES, SPLIT = Context(method="ulysses"), Context(batch=BATCH)

# What is run with cp=3, the length of sequences, and what the error says.
FAULTS: list[tuple[type[Language], type[Positioned], Context, int, str]] = [
    (Language, Counting, Context(), 6, "got queries that differ by .*, keys that differ by .* in attention 0 of 2"),
    (Summed, Counting, SPLIT, 6, "got queries that differ by .* in attention 0 of 2"),
    (Language, Masked, Context(), 6, r"got cp=3 with an attention mask of shape \(2, 2\)"),
    (Whole, Masked, Context(), 6, r"got cp=3 with an attention mask of shape \(4, 6\)"),
    (Language, Positioned, ULYSSES, 6, r"got 4 heads and 4 heads of keys and values in the shape \(4, 4, 2, 4\)"),
    (Language, ByProducts, Context(), 6, "without any call of F.scaled_dot_product_attention"),
    (Language, Averaging, Context(), 6, "got output 0 that differs by .*, with equal attention"),
    (Language, Multihead, Context(), 6, "got nn.MultiheadAttention"),
    (Language, Remembering, Context(), 6, "got different values of model.norm.mean: they are updated from"),
    (Language, Pooled, Context(), 6, r"positions along dimension 1 with cp=3, got output of shape \(4, 32\)"),
    (Shifting, Positioned, SPLIT, 6, "Expected a loss over the 2 positions of each part .* got one over 1"),
    (Language, Positioned, SPLIT, 6, r"Expected lw.Loss\(sum, weight\) from training_step .* got Tensor"),
    (Bypassing, Positioned, Context(), 6, "got a step without a call of it"),
    (Language, Positioned, Context(), 7, "multiple of cp=3 .* got length 7 in indices of model"),
]


def run_step(mesh: DeviceMesh, kind: type[Language], model: type[Positioned], options: Context, length: int) -> Any:
    torch.manual_seed(0)
    module = kind(model().double())
    batch = {name: torch.stack([one[name] for one in Sentences(4, length)]) for name in BATCH}
    module.log = lambda *_, **__: None  # type: ignore[method-assign]  # there is no run
    parallel = share_sequences(module, options, mesh, torch.device("cpu"), verifies=True)
    return parallel.bind(module.training_step, "training_step")(batch, 0)


def run_faults(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    found = []
    for fault in FAULTS:
        try:
            run_step(mesh, *fault[:4])
        except ModuleError as error:
            found.append(str(error))
        else:
            found.append("no error")
    return found


def test_faults_are_named_on_every_rank() -> None:
    for found in run_ranks(run_faults, 3):
        for message, (*_, wanted) in zip(found, FAULTS, strict=True):
            assert re.search(wanted, message), f"{wanted}\n{message}"


def bind_prediction(rank: int, size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    module, found = Language(Positioned().double()), []
    for options in (SPLIT, Context()):
        parallel = share_sequences(module, options, mesh, torch.device("cpu"), verifies=True)
        try:
            parallel.bind(module.predict_step, "predict_step")
        except ModuleError as error:
            found.append(error.what)
    return found


def test_predictions_of_parts_are_refused() -> None:
    for found in run_ranks(bind_prediction, 2):
        assert found == [
            "Expected full sequences in predict_step, got Context(batch=...) with cp=2: it would return predictions of "
            "parts of sequences, which cannot be joined."
        ]


def draw(rank: int, size: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    kept = []

    class Dropping(Positioned):
        def forward(self, indices: Tensor, position_ids: Tensor | None = None) -> Tensor:
            kept.append((F.dropout(torch.ones(2, 32), 0.5, self.training) > 0).tolist())
            return super().forward(indices, position_ids)

    states = []
    for _ in range(2):
        run_step(mesh, Language, Dropping, Context(), 6)
        states.append(torch.get_rng_state().tolist())
    return [kept, states]


def test_parts_draw_masks_of_their_own_and_ranks_continue_alike() -> None:
    everywhere = run_ranks(draw, 2)
    masks = [tuple(map(tuple, one)) for kept, _ in everywhere for one in kept if not all(map(all, one))]
    assert len(set(masks)) == 2  # each rank's, equal in both steps, which begin alike
    assert everywhere[0][1] == everywhere[1][1]


def of_transformers(rank: int, size: int) -> dict[str, Any]:
    """Compare losses and gradients of models of transformers with those on one rank."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
    )

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    found: dict[str, Any] = {}
    for name, build in {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4)),
        "window": lambda: MistralForCausalLM(MistralConfig(**sizes, **heads, sliding_window=6)),
    }.items():
        for method in ("gather", "ulysses"):
            torch.manual_seed(0)
            modules = [OfTransformers(build().double().eval()) for _ in range(2)]
            modules[1].load_state_dict(modules[0].state_dict())
            batch = {one: torch.stack([row[one] for row in Sentences(2)]) for one in BATCH}
            parallel = share_sequences(modules[0], Context(method=method), mesh, torch.device("cpu"), verifies=True)
            step = parallel.bind(modules[0].training_step, "training_step")
            try:
                loss = step(batch, 0)
            except ModuleError as error:
                found[f"{name} {method}"] = str(error)
                continue
            wanted = modules[1].training_step(batch, 0)
            with parallel.in_backward():
                loss.backward()
            wanted.backward()
            worst = abs(float(loss.detach() - wanted.detach()))
            for own, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
                assert own.grad is not None
                torch.distributed.all_reduce(own.grad)
                worst = max(worst, float((own.grad / size - other.grad).abs().max()))
            found[f"{name} {method}"] = worst
    return found


class OfTransformers(Language):
    """Calls a model of transformers by names of arguments."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(input_ids=batch["tokens"]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch["following"].flatten())


def test_models_of_transformers_get_positions_and_no_window() -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(of_transformers, 2):
        for name, value in found.items():
            if name.startswith("window"):
                assert "got cp=2 with a sliding window of 6" in value
            else:
                assert value <= 1e-13, name
