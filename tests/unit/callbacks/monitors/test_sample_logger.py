"""SampleLogger: what loggers get, when, and that training does not notice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from toys import RecordingLogger, ValidatedNet, assert_same, loader, momentum, net, quiet

from loopwright.callbacks import SampleLogger
from loopwright.errors import ConfigError


class Gallery(RecordingLogger):
    def __init__(self) -> None:
        super().__init__()
        self.images: list[Any] = []
        self.texts: list[Any] = []

    def log_image(self, key: str, images: Any, step: int | None = None, **kwargs: Any) -> None:
        self.images.append((key, [tuple(image.shape) for image in images], step, kwargs))

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        self.texts.append((key, text, step))


def pictures(module: Any, outputs: Any, batch: Any) -> Any:
    assert not module.training
    assert not torch.is_grad_enabled()
    count = len(batch[0])
    return torch.rand(count, 3, 2, 2), [f"sample {number}" for number in range(count)]


def describe(module: Any, outputs: Any, batch: Any) -> str:
    return f"the mean is {float(module(batch[0]).mean()):.3f}"


def fit(*callbacks: Any, **kwargs: Any) -> tuple[Any, Gallery]:
    logger, module = Gallery(), net(ValidatedNet, momentum, dropout=0.3)
    trainer = quiet(logger=logger, callbacks=list(callbacks), **{"max_epochs": 2, **kwargs})
    trainer.fit(module, loader(8, 2, shuffle=True), loader(6, 3))
    return module, logger


def test_the_first_batch_of_each_validation_is_shown() -> None:
    _, logger = fit(SampleLogger(pictures, describe, num_samples=2, name="digits"))
    captions = {"caption": ["sample 0", "sample 1"]}
    shapes = [(3, 2, 2), (3, 2, 2)]
    assert logger.images == [("validation/digits", shapes, step, captions) for step in (3, 7)]
    assert [(key, step) for key, _, step in logger.texts] == [("validation/digits", 3), ("validation/digits", 7)]
    assert logger.texts[0][1].startswith("the mean is ")


def test_training_shows_every_nth_step_and_is_the_same() -> None:
    plain, _ = fit()
    module, logger = fit(SampleLogger(pictures, stage="train", every_n_steps=3))
    assert [step for _, _, step, _ in logger.images] == [2, 5]
    assert_same(module, plain)


def test_a_test_shows_its_first_batch() -> None:
    logger = Gallery()
    trainer = quiet(logger=logger, callbacks=[SampleLogger(text=describe, stage="test")])
    trainer.test(net(ValidatedNet), loader(), verbose=False)
    assert len(logger.texts) == 1


def test_a_logger_that_fails_or_shows_nothing_does_not_stop_training() -> None:
    class Broken(Gallery):
        def log_image(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("full")

    broken, other = Broken(), RecordingLogger()
    trainer = quiet(logger=[broken, other], callbacks=[SampleLogger(pictures)], max_epochs=1)
    with pytest.warns(UserWarning, match="Broken failed"):
        trainer.fit(net(ValidatedNet), loader(), loader())
    assert trainer.global_step == 4


def test_arguments_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigError, match="neither images nor text is given; stage='fit' is not one of"):
        SampleLogger(stage="fit")
    with pytest.raises(ConfigError, match="counts steps of training, and stage='validation'"):
        SampleLogger(pictures, every_n_steps=2)
