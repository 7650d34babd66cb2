"""neuralforecast: N-HiTS and an LSTM on the airline passengers that come with it."""

import json
import logging
import os
import warnings

os.environ["NIXTLA_ID_AS_COL"] = "1"
from neuralforecast import NeuralForecast
from neuralforecast.losses.pytorch import DistributionLoss
from neuralforecast.models import LSTM, NHITS
from neuralforecast.utils import AirPassengersDF
from same_generators import KeepGenerators

warnings.filterwarnings("ignore")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
quiet["callbacks"] = [KeepGenerators()]
train, test = AirPassengersDF[:-12], AirPassengersDF[-12:]
models = [
    NHITS(h=12, input_size=24, max_steps=20, val_check_steps=10, random_seed=1, mlp_units=3 * [[16, 16]], **quiet),
    LSTM(
        h=12,
        input_size=24,
        max_steps=15,
        encoder_hidden_size=8,
        decoder_hidden_size=8,
        loss=DistributionLoss(distribution="Normal", level=[80]),
        scaler_type="standard",
        early_stop_patience_steps=2,
        val_check_steps=5,
        random_seed=2,
        **quiet,
    ),
]
forecaster = NeuralForecast(models=models, freq="ME")
forecaster.fit(df=train, val_size=12)
found = forecaster.predict()
forecaster.save("saved", overwrite=True, save_dataset=True)
again = NeuralForecast.load("saved").predict()
windows = forecaster.cross_validation(train, n_windows=2, step_size=12, val_size=12)
print(
    json.dumps(
        {
            "nhits": found["NHITS"].tolist(),
            "lstm": found["LSTM"].tolist(),
            "again": again["NHITS"].tolist(),
            "train_losses": [[step, float(loss)] for step, loss in forecaster.models[0].train_trajectories],
            "val_losses": [[step, float(loss)] for step, loss in forecaster.models[0].valid_trajectories],
            "windows": float(windows["NHITS"].sum()),
        }
    )
)
