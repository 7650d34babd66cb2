"""gluonts: DeepAR on made series, evaluated on their ends."""

import json
import warnings

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from gluonts.dataset.pandas import PandasDataset
from gluonts.dataset.split import split
from gluonts.evaluation import Evaluator
from gluonts.torch import DeepAREstimator, SimpleFeedForwardEstimator
from gluonts.transform import InstanceSampler
from lightning.pytorch.callbacks import Callback

warnings.filterwarnings("ignore")


class Anywhere(InstanceSampler):
    """Cuts one window from anywhere in a series, with a generator of its own.

    The library's samplers draw from numpy's global one. Loopwright gives data that are drawn ahead numbers of their
    own, so that a run can be resumed exactly: with those samplers the windows are others than in Lightning.
    """

    def __call__(self, ts):
        first, last = self._get_bounds(ts)
        return positions.integers(first, last + 1, size=1)


class Losses(Callback):
    """Keeps what was logged."""

    def __init__(self):
        self.train = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.train.append(trainer.callback_metrics["train_loss"].item())


generator = np.random.default_rng(0)
time = np.arange(200)
frames = {
    name: pd.Series(
        10 + number + 3 * np.sin(time / 24 * 2 * np.pi + number) + generator.normal(0, 0.3, 200),
        index=pd.date_range("2024-01-01", periods=200, freq="h"),
        dtype="float32",
    )
    for number, name in enumerate("abc")
}
data = PandasDataset(frames)
train, ends = split(data, offset=-36)
pairs = ends.generate_instances(prediction_length=12, windows=3)
found = {}
for name, make, more in (
    ("deepar", DeepAREstimator, {"freq": "h", "hidden_size": 12}),
    ("feed_forward", SimpleFeedForwardEstimator, {}),
):
    pl.seed_everything(5)
    losses = Losses()
    positions = np.random.default_rng(8)
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    estimator = make(
        prediction_length=12,
        batch_size=16,
        train_sampler=Anywhere(min_future=12, min_past=24),
        num_batches_per_epoch=8,
        trainer_kwargs={"max_epochs": 3, "callbacks": [losses], **quiet},
        **more,
    )
    predictor = estimator.train(train)
    pl.seed_everything(6)
    forecasts = list(predictor.predict(pairs.input))
    actual = [frames[one.item_id].to_period("h").to_frame(0)[: one.start_date + 11] for one in forecasts]
    total, _ = Evaluator(quantiles=(0.1, 0.5, 0.9), num_workers=None)(actual, forecasts)
    found[name] = {
        "losses": losses.train,
        "mean": [float(value) for value in forecasts[0].mean],
        "crps": float(total["mean_wQuantileLoss"]),
        "mase": float(total["MASE"]),
    }
print(json.dumps(found))
