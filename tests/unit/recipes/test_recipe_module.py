"""`RecipeModule` in one process: gradients of a loop over transformers and peft, schedule, checks and checkpoints."""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_models import batch, import_libraries, loader, own_loss, save_model, settings, trainer
from torch import Tensor

import loopwright as lw
from loopwright import CheckpointError, ConfigError, DataError
from loopwright.recipes.loss import find_router_loss
from loopwright.recipes.model.loading import LoraSettings, ModelSettings, meta_model, open_model
from loopwright.recipes.module import OptimizerSettings, RecipeModule, block_classes
from loopwright.recipes.optimizer import make_optimizers, make_schedule


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_libraries()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("saved") / "llama")


@pytest.fixture
def _exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let norms of Llama compute in the dtype of their input: they round to float32 otherwise."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def forward(self: Any, x: Tensor) -> Tensor:
        scaled: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * scaled

    monkeypatch.setattr(LlamaRMSNorm, "forward", forward)


class Gradients(RecipeModule):
    """Keeps the gradients of the first step."""

    found: dict[str, Tensor]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found = {name: one.grad.clone() for name, one in self.model.named_parameters() if one.grad is not None}


def by_hand(folder: Path, kind: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the gradients of transformers and peft over two batches, without any of our code."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if kind != "full":
        adapters = LoraConfig(
            r=4, lora_alpha=8, target_modules="all-linear", use_dora=kind == "dora", task_type="CAUSAL_LM"
        )
        torch.manual_seed(5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(model, adapters)
    model.train()
    losses = [own_loss(model, given) for given in loader(2, rows=4)]
    (sum(loss for loss, _ in losses) / sum(count for _, count in losses)).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.usefixtures("_exact_norms")
@pytest.mark.parametrize("chunk_tokens", [None, 5, 0])
@pytest.mark.parametrize("kind", ["full", "lora", "dora"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
def test_gradients_are_those_of_a_loop_by_hand(
    folder: Path, kind: str, dtype: str, tolerance: float, chunk_tokens: int | None
) -> None:
    expected = by_hand(folder, kind, getattr(torch, dtype))
    module = Gradients(settings(folder, kind, dtype=dtype), OptimizerSettings(), 1, chunk_tokens=chunk_tokens)
    trainer(max_steps=1, accumulate_grad_batches=2).fit(module, loader(2, rows=4))
    assert module.found.keys() == expected.keys()
    assert {name for name, one in module.model.named_parameters() if one.requires_grad} == expected.keys()
    assert max(float(one.abs().max()) for one in expected.values()) > 1e-2
    for name, one in expected.items():
        torch.testing.assert_close(module.found[name], one, rtol=0, atol=tolerance, msg=name)


def test_blocks_computed_twice_have_the_same_gradients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, again = (
        Gradients(settings(folder, "lora", gradient_checkpointing=one), OptimizerSettings(), 1) for one in (False, True)
    )
    from transformers.models.llama.modeling_llama import LlamaMLP

    calls: list[bool] = []
    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: calls.append(self.training) or forward(self, x))
    for module in (plain, again):
        calls.clear()
        trainer(max_steps=1).fit(module, loader(2, rows=2))
        # The first batch runs three times in evaluation, for the checks; each of two blocks again in the backward pass.
        assert calls.count(True) == (4 if module is again else 2)
    for name, one in plain.found.items():
        torch.testing.assert_close(again.found[name], one, rtol=0, atol=1e-7, msg=name)


def test_validation_is_a_mean_over_tokens(folder: Path) -> None:
    module = RecipeModule(settings(folder), OptimizerSettings(learning_rate=1e-12), 2)
    runner = trainer(max_steps=2, has_val=True)
    runner.fit(module, loader(2, rows=4), loader(3, rows=8, seed=9))
    with torch.no_grad():
        pairs = [own_loss(module.model, given) for given in loader(3, rows=8, seed=9)]
    expected = float(sum(loss for loss, _ in pairs) / sum(count for _, count in pairs))
    assert float(runner.callback_metrics["val_loss"]) == pytest.approx(expected, rel=1e-5)
    means = sum(float(loss / count) for loss, count in pairs) / len(pairs)
    assert abs(means - expected) > 1e-4, "batches with equally many tokens show nothing"


def test_the_first_batch_of_a_wrong_model_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaModel

    forward = LlamaModel.forward

    def with_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **{**kwargs, "use_cache": True})

    monkeypatch.setattr(LlamaModel, "forward", with_cache)
    with pytest.raises(ConfigError, match="packing=false"):
        trainer().fit(RecipeModule(settings(folder), OptimizerSettings(), 4), loader(2))
    trainer().fit(RecipeModule(settings(folder), OptimizerSettings(), 4, verify_packing=False), loader(2))


def test_logits_that_the_model_changes_are_computed_at_once(tmp_path: Path) -> None:
    module = Gradients(settings(save_model(tmp_path / "m", "cohere")), OptimizerSettings(), 1)
    trainer(max_steps=1).fit(module, loader(2, rows=2))
    assert module.notes == [
        "The logits of all tokens are computed at once, because the model computes more than its output layer on them."
    ]
    model = open_model(module.settings).train()
    loss, count = own_loss(model, batch(2))
    (loss / count).backward()
    for name, one in model.named_parameters():
        torch.testing.assert_close(module.found[name], one.grad, rtol=0, atol=1e-6, msg=name)


def test_data_without_a_trained_token_are_refused(folder: Path) -> None:
    batches = [{**given, "labels": torch.full_like(given["labels"], -100)} for given in loader(2, rows=4)]
    for chunk_tokens in (None, 0):
        module = RecipeModule(settings(folder), OptimizerSettings(), 2, chunk_tokens=chunk_tokens)
        with pytest.raises(DataError, match="labels that are all -100"):
            trainer(max_steps=-1, max_epochs=1).fit(module, batches)


# -- what a model adds to its loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [None, 0])
@pytest.mark.parametrize(("family", "kind"), [("mixtral", "full"), ("qwen3_moe", "lora")])
def test_the_loss_of_a_router_counts_by_tokens(
    tmp_path: Path, family: str, kind: str, chunk_tokens: int | None
) -> None:
    chosen = settings(save_model(tmp_path / "m", family), kind)
    module = Gradients(chosen, OptimizerSettings(), 1, chunk_tokens=chunk_tokens)
    runner = trainer(max_steps=1, accumulate_grad_batches=2)
    runner.fit(module, loader(2, rows=4))

    model: Any = open_model(chosen)
    crosses, added, tokens = torch.zeros(()), torch.zeros(()), torch.zeros(())
    for given in loader(2, rows=4):
        loss, count = own_loss(model, given)
        routed = model(
            input_ids=given["input_ids"], position_ids=given["position_ids"], use_cache=False, output_router_logits=True
        )
        crosses, added, tokens = crosses + loss, added + count * routed.aux_loss, tokens + count
    ((crosses + 0.5 * added) / tokens).backward()
    for name, one in model.named_parameters():
        if one.grad is not None:
            torch.testing.assert_close(module.found[name], one.grad, rtol=0, atol=1e-6, msg=name)
    found = runner.callback_metrics
    assert float(found["train_loss"]) == pytest.approx((crosses / tokens).item(), rel=1e-6)  # as without experts
    assert float(found["router_aux_loss"]) == pytest.approx((added / tokens).item(), rel=1e-6)
    assert module.notes == []


def test_the_factor_of_a_routers_loss_is_a_setting(tmp_path: Path) -> None:
    silent = save_model(tmp_path / "silent", "mixtral", output_router_logits=False)
    asking = save_model(tmp_path / "asking", "mixtral")
    found = {}
    for name, folder, coef in (("0", asking, 0.0), ("none", silent, None), ("0.5", silent, 0.5), ("own", asking, None)):
        module = Gradients(settings(folder, router_aux_loss_coef=coef), OptimizerSettings(), 1)
        trainer(max_steps=1).fit(module, loader(2, rows=2))
        found[name] = module.found
    assert all(torch.equal(one, found["none"][name]) for name, one in found["0"].items())
    assert all(torch.equal(one, found["own"][name]) for name, one in found["0.5"].items())
    assert any(not torch.equal(one, found["own"][name]) for name, one in found["0"].items())


def test_padding_has_no_part_in_the_loss_of_a_router(tmp_path: Path) -> None:
    model: Any = open_model(settings(save_model(tmp_path / "m", "mixtral")))
    router = find_router_loss(model)
    assert router is not None
    ids, lengths = batch(2)["input_ids"], torch.tensor([16, 9])
    logits = model(input_ids=ids, use_cache=False).router_logits
    kept = torch.cat([torch.arange(16), 16 + torch.arange(9)])
    expected = router.value([one[kept] for one in logits])
    found = router.of_batch(logits, {"input_ids": ids, "lengths": lengths}, 5.0)
    torch.testing.assert_close(found.mean(), expected)
    assert abs((router.value(logits) - expected).item()) > 1e-4


def test_a_term_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "m", "bamba")
    with pytest.raises(ConfigError, match=r"loss is the cross entropy of its logits, \d.* it adds a term"):
        trainer().fit(RecipeModule(settings(folder), OptimizerSettings(), 4, verify_packing=False), loader(2))
    allowed = settings(folder, router_aux_loss_coef=0)
    trainer(max_steps=1).fit(RecipeModule(allowed, OptimizerSettings(), 1, verify_packing=False), loader(2))


# -- optimizer ---------------------------------------------------------------------------------------------------------


def test_vectors_have_no_weight_decay(folder: Path) -> None:
    module = open_model(settings(folder))
    (optimizer,) = make_optimizers(OptimizerSettings(weight_decay=0.1), module)
    decayed, others = ({id(one) for one in group["params"]} for group in optimizer.param_groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for name, one in module.named_parameters():
        assert (id(one) in others) == ("norm" in name)
        assert (id(one) in decayed) == ("norm" not in name)


def test_another_optimizer_and_schedule(folder: Path) -> None:
    chosen = OptimizerSettings(
        learning_rate=0.5,
        optimizer={"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}},
        lr_scheduler={"class_path": "StepLR", "init_args": {"step_size": 1, "gamma": 0.5}},
    )
    assert chosen.problems() == []
    module = RecipeModule(settings(folder), chosen, 4)
    runner = trainer(max_steps=2)
    runner.fit(module, loader(2))
    optimizer = runner.optimizers[0]
    assert type(optimizer) is torch.optim.SGD
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    assert optimizer.param_groups[0]["momentum"] == 0.9


MUON = {
    "matrices": {"optimizer": {"class_path": "Muon"}, "learning_rate": 0.02, "momentum": 0.9, "weight_decay": 0.1},
    "embeddings": {"learning_rate": 3e-3},
}


def fit_groups(folder: Path, max_steps: int, path: Path | None = None) -> tuple[lw.Trainer, RecipeModule]:
    chosen = OptimizerSettings(learning_rate=1e-2, eps=1e-4, schedule="linear", warmup=0, groups=MUON)
    runner, module = trainer(max_steps=max_steps), RecipeModule(settings(folder), chosen, 4)
    runner.fit(module, loader(2), ckpt_path=path)
    return runner, module


def test_groups_of_parameters_have_optimizers_and_rates(folder: Path, tmp_path: Path) -> None:
    runner, module = fit_groups(folder, 4)
    names = [[group["name"] for group in one.param_groups] for one in runner.optimizers]
    assert names == [["matrices"], ["vectors", "embeddings", "head"]]

    model: Any = open_model(settings(folder))
    by_name = dict(model.named_parameters())
    table, head = by_name["model.embed_tokens.weight"], by_name["lm_head.weight"]
    matrices = [one for one in by_name.values() if one.ndim == 2 and one is not table and one is not head]
    adamw = partial(lw.optim.adamw, weight_decay=0, eps=1e-4)
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=0.1),
        adamw([one for one in by_name.values() if one.ndim == 1], lr=1e-2),
        adamw([table], lr=3e-3),
        adamw([head], lr=1e-2),
    ]
    rates = [one.param_groups[0]["lr"] for one in optimizers]
    for step, given in zip(range(4), loader(2), strict=False):
        for one, rate in zip(optimizers, rates, strict=True):
            one.param_groups[0]["lr"] = rate * (1 - step / 4)
            one.zero_grad()
        loss, count = own_loss(model, given)
        (loss / count).backward()
        for one in optimizers:
            one.step()
    for name, one in module.model.named_parameters():
        # Muon divides updates by their norm, which enlarges the rounding of gradients (1e-7).
        torch.testing.assert_close(one, by_name[name], rtol=0, atol=2e-5, msg=name)

    half, _ = fit_groups(folder, 2)
    half.save_checkpoint(tmp_path / "half.ckpt")
    _, resumed = fit_groups(folder, 4, tmp_path / "half.ckpt")
    assert all(torch.equal(one, resumed.state_dict()[name]) for name, one in module.state_dict().items())


def test_muon_leaves_the_rest_to_adamw(folder: Path) -> None:
    muon = {"class_path": "torch.optim.Muon", "init_args": {"momentum": 0.8}}
    chosen = OptimizerSettings(
        learning_rate=1e-3, weight_decay=0.1, optimizer=muon, groups={"embeddings": {"learning_rate": 1e-4}}
    )
    model: Any = open_model(settings(folder))
    names = {id(one): name for name, one in model.named_parameters()}
    first, second = make_optimizers(chosen, model)
    assert (type(first), type(second)) == (torch.optim.Muon, torch.optim.AdamW)
    (matrices,) = first.param_groups
    assert all("layers" in names[id(one)] and one.ndim == 2 for one in matrices["params"])
    assert len(matrices["params"]) == sum("layers" in name and one.ndim == 2 for name, one in model.named_parameters())
    assert (matrices["lr"], matrices["weight_decay"], matrices["momentum"]) == (1e-3, 0.1, 0.8)
    assert matrices["adjust_lr_fn"] == "match_rms_adamw"  # one rate is for both
    vectors, embeddings, head = second.param_groups
    assert [(one["lr"], one["weight_decay"]) for one in (vectors, embeddings, head)] == [
        (1e-3, 0.0), (1e-4, 0.1), (1e-3, 0.1),
    ]  # fmt: skip
    assert [names[id(one)] for one in (*embeddings["params"], *head["params"])] == [
        "model.embed_tokens.weight", "lm_head.weight",
    ]  # fmt: skip
    runner, module = trainer(max_steps=2), RecipeModule(settings(folder), chosen, 4)
    runner.fit(module, loader(2))
    assert {*module.learning_rates} == {"matrices", "vectors", "embeddings", "head"}


@pytest.mark.parametrize(
    ("chosen", "problem"),
    [
        ({"optimizer": {"class_path": "Muon", "init_args": {"n": 1}}}, "groups.matrices: Expected arguments .*Muon"),
        ({"groups": {"vectors": {"optimizer": {"class_path": "Muon"}}}}, "groups.vectors: Expected .* Muon takes"),
        ({"groups": {"matrices": {"momentun": 1}}}, "groups.matrices: Expected .*'momentun'"),
        ({"groups": {"stacks": {"learning_rate": 1}}}, "groups.stacks: Expected trained parameters of this kind"),
        ({"lr_scheduler": {"class_path": "StepLR"}}, "lr_scheduler: Expected arguments that StepLR takes, got"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_named(folder: Path, chosen: dict[str, Any], problem: str) -> None:
    given = OptimizerSettings(**chosen)
    with pytest.raises(ConfigError, match=problem):
        make_schedule(given, make_optimizers(given, meta_model(settings(folder)))[0], 10)


def test_invalid_groups_are_named() -> None:
    groups: Any = {"matrix": {}, "head": 3, "vectors": {"learning_rate": -1}}
    kind, *others = OptimizerSettings(groups=groups).problems()
    assert "(matrices, vectors, embeddings, head, stacks), got 'matrix' (did you mean 'matrices'?)" in kind
    assert others == [
        "groups.head: Expected optimizer, learning_rate and weight_decay, got 3.",
        "groups.vectors.learning_rate: Expected at least 0, got -1.",
    ]


@pytest.mark.parametrize("warmup", [10, 0.1])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "polynomial", "constant", "wsd"])
def test_the_learning_rate_rises_and_falls(schedule: str, warmup: float) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    chosen = OptimizerSettings(warmup=warmup, schedule=schedule, min_lr=0.2)
    assert chosen.problems() == []
    share: Any = make_schedule(chosen, optimizer, 100)
    rates = [share.lr_lambdas[0](step) for step in range(100)]
    assert rates[:10] == [step / 10 for step in range(1, 11)]
    middle = {"cosine": 0.2 + 0.8 * (1 + math.cos(math.pi / 2)) / 2, "linear": 0.6, "polynomial": 0.6}
    assert rates[55] == pytest.approx(middle.get(schedule, 1))
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert share.lr_lambdas[0](100) == pytest.approx(1 if schedule == "constant" else 0.2)


def test_rates_are_scaled_by_the_number_of_data_ranks_on_request() -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [weight], "lr": 0.5}], lr=1.0)
    for chosen in (
        OptimizerSettings(warmup=2, schedule="linear", min_lr=0.5, scale_lr=True),
        OptimizerSettings(
            lr_scheduler={"class_path": "linear", "init_args": {"warmup": 2, "min_lr_ratio": 0.5}}, scale_lr=True
        ),
    ):
        assert chosen.problems() == []
        share: Any = make_schedule(chosen, optimizer, 10, data_ranks=4)
        assert [share.base_lrs[0] * share.lr_lambdas[0](step) for step in (0, 1, 10)] == [1.0, 2.0, 1.0]

    other = OptimizerSettings(scale_lr=True, lr_scheduler={"class_path": "StepLR", "init_args": {"step_size": 1}})
    assert other.problems() == [
        "scale_lr: Expected a schedule of lw.schedules beside it, got lr_scheduler, whose rates it may set."
    ]


def test_a_schedule_of_loopwright_gets_its_arguments_and_the_length_of_the_run(folder: Path) -> None:
    chosen = OptimizerSettings(
        learning_rate=0.5,
        optimizer={"class_path": "torch.optim.SGD"},
        lr_scheduler={"class_path": "wsd", "init_args": {"warmup": 2, "decay": 0.5}},
    )
    assert chosen.problems() == []
    runner, module = trainer(max_steps=3), RecipeModule(settings(folder), chosen, 4)
    runner.fit(module, loader(2))
    assert runner.optimizers[0].param_groups[0]["lr"] == 0.25  # half of the decay over 2 steps


def test_every_invalid_setting_of_the_optimizer_is_named() -> None:
    wrong = OptimizerSettings(
        learning_rate=0, weight_decay=-1, betas=(0.9, 1.0), eps=0, warmup=2.0, schedule="cosin", min_lr=-1,
        optimizer={"class_path": "torch.nn.Linear"}, lr_scheduler={"class": "StepLR"},
    )  # fmt: skip
    names = [one.partition(":")[0] for one in wrong.problems()]
    assert names == [
        "learning_rate", "weight_decay", "betas", "eps", "warmup", "min_lr", "schedule", "optimizer", "lr_scheduler"
    ]  # fmt: skip
    assert all(": Expected " in one and ", got " in one for one in wrong.problems())
    assert OptimizerSettings().problems() == []


# -- checkpoints -------------------------------------------------------------------------------------------------------


def fit(folder: Path, kind: str, max_steps: int, path: Path | None = None) -> tuple[lw.Trainer, RecipeModule]:
    runner = trainer(max_steps=max_steps)
    module = RecipeModule(settings(folder, kind), OptimizerSettings(learning_rate=1e-2, eps=1e-4), 4)
    runner.fit(module, loader(2), ckpt_path=path)
    return runner, module


def test_dropout_is_active_in_training_and_in_no_check(tmp_path: Path) -> None:
    module = Gradients(settings(save_model(tmp_path / "m", "gpt2", resid_pdrop=0.5)), OptimizerSettings(), 1)
    runner = trainer(max_steps=1)
    runner.fit(module, loader(2, rows=2))
    assert module.model.training
    without = Gradients(settings(save_model(tmp_path / "n", "gpt2")), OptimizerSettings(), 1)
    trainer(max_steps=1).fit(without, loader(2, rows=2))
    assert any(not torch.allclose(one, without.found[name]) for name, one in module.found.items())


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_resumed_run_is_the_uninterrupted_one(folder: Path, tmp_path: Path, kind: str) -> None:
    _, expected = fit(folder, kind, 4)
    runner, _ = fit(folder, kind, 2)
    runner.save_checkpoint(tmp_path / "half.ckpt")
    _, found = fit(folder, kind, 4, tmp_path / "half.ckpt")
    for name, one in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], one), name
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)
    assert all("lora_" in name for name in saved["state_dict"]) == (kind == "lora")
    assert saved["recipe"]["model"]["model"] == str(folder)
    assert (saved["recipe"]["fingerprint"] is None) == (kind == "full")


def test_adapters_of_another_base_are_refused(folder: Path, tmp_path: Path) -> None:
    runner, _ = fit(folder, "lora", 2)
    runner.save_checkpoint(tmp_path / "half.ckpt")
    other = save_model(tmp_path / "other", seed=4)
    with pytest.raises(CheckpointError, match="Expected the base model .*other values of the same shapes"):
        fit(other, "lora", 4, tmp_path / "half.ckpt")


def test_blocks_are_those_that_the_model_names(folder: Path) -> None:
    assert block_classes(settings(folder)) == {"LlamaDecoderLayer"}


def test_settings_are_values() -> None:
    assert ModelSettings(Path("a"), lora=LoraSettings()) == ModelSettings(Path("a"), lora=LoraSettings())
