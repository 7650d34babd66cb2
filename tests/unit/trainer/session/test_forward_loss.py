"""Models of Hugging Face are trained as they are: their `forward` returns the loss."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import loopwright as lw

transformers = pytest.importorskip("transformers")
QUIET = {
    "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "num_sanity_val_steps": 0,
}  # fmt: skip


def make_model(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=2,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **changes,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def make_loader(**left_out: None) -> DataLoader[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(20, (8, 5), generator=generator)
    samples = [{"input_ids": row, "attention_mask": torch.ones(5), "labels": row[0] % 2} for row in ids]
    return DataLoader([{k: v for k, v in one.items() if k not in left_out} for one in samples], batch_size=4)


def test_trains_as_a_handwritten_loop_does() -> None:
    model, twin = make_model(), make_model()
    lw.Trainer(**QUIET).fit(model.eval(), make_loader())
    optimizer = torch.optim.AdamW(twin.parameters(), lr=5e-5, weight_decay=0.0)
    twin.train()
    for batch in make_loader():
        twin(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.training
    for (name, value), expected in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        assert torch.equal(value, expected), name


def test_losses_are_logged_and_predictions_are_outputs() -> None:
    model, trainer = make_model(), lw.Trainer(**QUIET)
    trainer.fit(model, make_loader(), make_loader())
    assert {"train_loss", "val_loss"} <= trainer.callback_metrics.keys()
    [result] = trainer.test(model, make_loader(), verbose=False)
    model.eval()
    with torch.no_grad():
        expected = torch.stack([model(**batch).loss for batch in make_loader()]).mean()
    assert result["test_loss"] == pytest.approx(expected.item())
    outputs = trainer.predict(model, make_loader(labels=None))
    assert outputs is not None
    assert [output.logits.shape for output in outputs] == [(4, 2), (4, 2)]


def test_an_optimizer_of_ones_own_is_kept() -> None:
    model = make_model()
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = lw.Trainer(**QUIET)
    trainer.fit(model, make_loader())
    [optimizer] = trainer.optimizers
    assert isinstance(optimizer, torch.optim.SGD)


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_only_adapters_are_trained() -> None:
    peft = pytest.importorskip("peft")
    base = make_model()
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"]))
    before = copy.deepcopy(model.state_dict())
    trainer = lw.Trainer(**QUIET)
    trainer.fit(model, make_loader())
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name or "classifier" in name for name in changed)


def test_a_trained_model_is_copied_and_pickled() -> None:
    model = make_model()
    lw.Trainer(**QUIET).fit(model, make_loader())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        lw.Trainer(**QUIET).fit(twin, make_loader())
        assert twin.training_step.model is twin


def test_a_batch_without_labels_is_refused() -> None:
    with pytest.raises(lw.ModuleError, match="returned no loss for a batch with attention_mask, input_ids"):
        lw.Trainer(**QUIET).fit(make_model(), make_loader(labels=None))


def test_a_batch_that_is_not_a_mapping_is_refused() -> None:
    with pytest.raises(lw.ModuleError, match="the batch is list"):
        lw.Trainer(**QUIET).fit(make_model(), DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 3).long())))


def test_other_modules_need_a_training_step() -> None:
    with pytest.raises(lw.ModuleError, match="training_step"):
        lw.Trainer(**QUIET).fit(torch.nn.Linear(1, 1), make_loader())
