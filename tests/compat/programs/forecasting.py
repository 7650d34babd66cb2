"""pytorch-forecasting: a temporal fusion transformer on made series, with a search for the learning rate."""

import json
import os
import warnings

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.tuner import Tuner
from pytorch_forecasting import Baseline, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data.examples import generate_ar_data
from pytorch_forecasting.metrics import MAE, QuantileLoss
from same_generators import KeepGenerators

warnings.filterwarnings("ignore")
# The checkpoints of this library hold objects of its own, and Lightning's lr_find cannot be told so.
os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
HISTORY, AHEAD = 20, 5

pl.seed_everything(42)
frame = generate_ar_data(seasonality=10.0, timesteps=80, n_series=10, seed=42)
frame["static"] = "2"
last = frame["time_idx"].max() - AHEAD
training = TimeSeriesDataSet(
    frame[lambda x: x.time_idx <= last],
    time_idx="time_idx",
    target="value",
    group_ids=["series"],
    static_categoricals=["static"],
    time_varying_unknown_reals=["value"],
    time_varying_known_reals=["time_idx"],
    max_encoder_length=HISTORY,
    max_prediction_length=AHEAD,
    add_relative_time_idx=True,
    add_target_scales=True,
)
validation = TimeSeriesDataSet.from_dataset(training, frame, min_prediction_idx=last + 1)
train_loader = training.to_dataloader(train=True, batch_size=32, num_workers=0)
val_loader = validation.to_dataloader(train=False, batch_size=32, num_workers=0)


def make(lr):
    pl.seed_everything(7)
    return TemporalFusionTransformer.from_dataset(
        training,
        learning_rate=lr,
        hidden_size=8,
        attention_head_size=1,
        dropout=0.1,
        hidden_continuous_size=8,
        loss=QuantileLoss(),
        log_interval=5,
        reduce_on_plateau_patience=4,
    )


def trainer(**arguments):
    return pl.Trainer(
        accelerator="cpu", gradient_clip_val=0.1, enable_progress_bar=False, enable_model_summary=False, **arguments
    )


found = Tuner(trainer(max_epochs=3, logger=False)).lr_find(
    make(0.03), train_loader, val_loader, max_lr=1.0, min_lr=1e-4, num_training=30, early_stop_threshold=1000.0
)

one_epoch = trainer(max_epochs=1, limit_train_batches=10, limit_val_batches=0, logger=TensorBoardLogger("logs"))
model = make(0.03)
one_epoch.fit(model, train_loader)
after_one = {"train_loss": one_epoch.callback_metrics["train_loss_epoch"].item()}

stopping = EarlyStopping(monitor="val_loss", min_delta=1e-4, patience=10, mode="min")
whole = trainer(
    max_epochs=3,
    limit_train_batches=10,
    callbacks=[LearningRateMonitor(), stopping, KeepGenerators()],
    logger=TensorBoardLogger("logs"),
)
model = make(0.03)
whole.fit(model, train_loader, val_loader)
best = TemporalFusionTransformer.load_from_checkpoint(whole.checkpoint_callback.best_model_path, weights_only=False)
quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
predicted = best.predict(val_loader, return_y=True, trainer_kwargs=dict(quiet))
quantiles = best.predict(val_loader, mode="quantiles", return_y=True, trainer_kwargs=dict(quiet)).output
naive = Baseline().predict(val_loader, return_y=True, trainer_kwargs=dict(quiet))
print(
    json.dumps(
        {
            "one_epoch": after_one,
            "lrs_tried": len(found.results["loss"]),
            "has_suggestion": found.suggestion() is not None,
            "steps": whole.global_step,
            "epochs": whole.current_epoch,
            "val_loss": whole.callback_metrics["val_loss"].item(),
            "mae": MAE()(predicted.output, predicted.y).item(),
            "quantiles": quantiles.double().mean().item(),
            "naive": MAE()(naive.output, naive.y).item(),
        }
    )
)
