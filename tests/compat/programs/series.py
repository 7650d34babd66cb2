"""darts: N-BEATS and a TCN on made series; predictions, backtest, checkpoints by name."""

import json
import warnings

import numpy as np
from darts.metrics import mape
from darts.models import NBEATSModel, TCNModel
from darts.utils.timeseries_generation import linear_timeseries, sine_timeseries
from pytorch_lightning.callbacks import Callback, EarlyStopping
from same_generators import KeepGenerators

warnings.filterwarnings("ignore")


class Losses(Callback):
    """Keeps what was logged."""

    def __init__(self):
        super().__init__()
        self.train, self.val = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.train.append(trainer.callback_metrics["train_loss"].item())

    def on_validation_epoch_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.val.append(trainer.callback_metrics["val_loss"].item())


series = (sine_timeseries(length=160, value_frequency=0.05) + linear_timeseries(length=160, end_value=2) + 4).astype(
    np.float32
)
train, val = series.split_before(0.75)
quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}

alone = NBEATSModel(24, 12, n_epochs=3, random_state=0, num_layers=2, layer_widths=16, pl_trainer_kwargs=quiet)
alone.fit(train)
forecast = alone.predict(n=20)

losses = Losses()
stopping = EarlyStopping("val_loss", patience=5, min_delta=0.001)
checked = TCNModel(
    24,
    12,
    n_epochs=4,
    random_state=1,
    dropout=0.1,
    work_dir="darts",
    model_name="tcn",
    save_checkpoints=True,
    force_reset=True,
    pl_trainer_kwargs={**quiet, "callbacks": [losses, stopping, KeepGenerators()]},
)
checked.fit(train, val_series=val)
best = TCNModel.load_from_checkpoint("tcn", work_dir="darts", best=True, trusted=True)
last = TCNModel.load_from_checkpoint("tcn", work_dir="darts", best=False, trusted=True)
last.save("model.pt")
again = TCNModel.load("model.pt", trusted=True)
past = best.historical_forecasts(series, start=0.9, forecast_horizon=6, retrain=False, verbose=False)
print(
    json.dumps(
        {
            "forecast": forecast.values().ravel().tolist(),
            "mape": float(mape(val, forecast)),
            "train_losses": losses.train,
            "val_losses": losses.val,
            "epochs": checked.epochs_trained,
            "best": best.predict(n=6, series=train).values().ravel().tolist(),
            "last": last.predict(n=6, series=train).values().ravel().tolist(),
            "again": again.predict(n=6, series=train).values().ravel().tolist(),
            "past": past.values().ravel().tolist(),
        }
    )
)
