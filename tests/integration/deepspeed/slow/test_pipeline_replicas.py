"""DeepSpeed's PipelineModule with two stages and two replicas: four processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipelines import check_fabric, check_trainer
from ranks import import_deepspeed


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    import_deepspeed()


def test_replicas_of_stages_train_as_one_process(tmp_path: Path) -> None:
    check_fabric(4, 2, tmp_path)


def test_the_trainer_deals_data_to_replicas(tmp_path: Path) -> None:
    check_trainer(4, 1, True, tmp_path)
