"""pytorch-tabular: an embedding model for a table of numbers and categories."""

import json
import warnings

import pandas as pd
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import CategoryEmbeddingModelConfig
from same_generators import KeepGenerators
from sklearn.datasets import make_classification

warnings.filterwarnings("ignore")
numbers, target = make_classification(n_samples=400, n_features=6, n_informative=4, random_state=3)
table = pd.DataFrame(numbers, columns=[f"x{number}" for number in range(6)])
table["kind"] = pd.cut(table["x0"], 3, labels=["low", "middle", "high"]).astype(str)
table["target"] = target
train, val, test = table[:250], table[250:320], table[320:]
model = TabularModel(
    data_config=DataConfig(target=["target"], continuous_cols=[f"x{n}" for n in range(6)], categorical_cols=["kind"]),
    model_config=CategoryEmbeddingModelConfig(
        task="classification", layers="16-8", activation="LeakyReLU", dropout=0.1, learning_rate=1e-2, seed=11
    ),
    optimizer_config=OptimizerConfig(optimizer="Adam", lr_scheduler="StepLR", lr_scheduler_params={"step_size": 2}),
    trainer_config=TrainerConfig(
        batch_size=50,
        max_epochs=4,
        accelerator="cpu",
        progress_bar="none",
        early_stopping="valid_loss",
        early_stopping_patience=3,
        checkpoints="valid_loss",
        checkpoints_path="tables",
        load_best=True,
        trainer_kwargs={"enable_model_summary": False},
        seed=11,
    ),
    verbose=False,
)
model.fit(train=train, validation=val, callbacks=[KeepGenerators()])
result = model.evaluate(test, verbose=False)
predicted = model.predict(test)
model.save_model("tables_saved")
again = TabularModel.load_model("tables_saved").predict(test)
column = "target_1_probability" if "target_1_probability" in predicted else "1_probability"
print(
    json.dumps(
        {
            "result": result,
            "first": predicted[column][:8].tolist(),
            "sum": float(predicted[column].sum()),
            "same": bool((again[column] == predicted[column]).all()),
            "steps": model.trainer.global_step,
            "metric": model.trainer.callback_metrics["test_loss"].item(),
        }
    )
)
