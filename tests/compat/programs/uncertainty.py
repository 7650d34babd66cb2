"""lightning-uq-box: a network that predicts mean and variance, on its own toy data."""

import json
import warnings
from functools import partial

import lightning as L
from lightning_uq_box.datamodules import ToyHeteroscedasticDatamodule
from lightning_uq_box.models import MLP
from lightning_uq_box.uq_methods import MVERegression
from same_generators import KeepGenerators
from torch.optim import Adam

warnings.filterwarnings("ignore")
L.seed_everything(0)
data = ToyHeteroscedasticDatamodule(batch_size=32)
network = MLP(n_inputs=1, n_outputs=2, n_hidden=[16])
model = MVERegression(network, optimizer=partial(Adam, lr=1e-2), burnin_epochs=2)
trainer = L.Trainer(
    max_epochs=5,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
    callbacks=[KeepGenerators()],
)
trainer.fit(model, data)
logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
tested = trainer.test(model, data, verbose=False)
predicted = model.predict_step(data.X_test)["pred"].detach().flatten()[:5].tolist()
print(json.dumps({"logged": logged, "test": tested, "predicted": predicted}))
