"""Weights go to a server that answers as the hub does, and come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import SHA, Hub, serve_hub
from torch import nn
from toys import Net, assert_same, loader, quiet

import loopwright as lw
from loopwright.errors import ArgumentTypeError, CheckpointError, ConfigError

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
from loopwright.integrations.hub import load_from_hub, push_to_hub, write_hub_files  # noqa: E402


class Tied(Net):
    """Hyperparameters, and a tensor with two names."""

    def __init__(self, width: int, lr: float = 0.1, act: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        self.again = self.net[0]
        self.act = act


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    from huggingface_hub import HfFileSystem, constants

    with serve_hub({}) as (endpoint, handler):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        HfFileSystem.clear_instance_cache()
        yield handler
        HfFileSystem.clear_instance_cache()


def test_a_module_comes_back_with_its_hyperparameters_and_weights(hub: type[Hub]) -> None:
    model = Tied(width=5)
    url = push_to_hub(model, "me/tied", metrics={"val_loss": torch.tensor(0.25)}, description="A toy.")
    assert url is not None
    assert url.endswith(f"me/tied/commit/{SHA}")
    assert hub.created["me/tied"]["visibility"] == "private"
    assert set(hub.files["me/tied"]) == {"model.safetensors", "config.json", "README.md"}
    assert json.loads(hub.files["me/tied"]["config.json"]) == {"width": 5, "lr": 0.1, "act": None}
    card = hub.files["me/tied"]["README.md"].decode()
    for text in (
        "library_name: loopwright",
        "# tied",
        "A toy.",
        "| val_loss | 0.25 |",
        "width: 5",
        "load_from_hub(Tied",
    ):
        assert text in card
    again = load_from_hub(Tied, "me/tied", lr=0.2)
    assert_same(again, model)
    assert again.hparams == {"width": 5, "lr": 0.2, "act": None}


def test_what_was_downloaded_is_not_downloaded_again(hub: type[Hub]) -> None:
    push_to_hub(Tied(width=5), "me/tied")
    load_from_hub(Tied, "me/tied")
    hub.asked.clear()
    load_from_hub(Tied, "me/tied", revision=SHA)
    assert not [one for one in hub.asked if one.startswith("GET") and "resolve" in one]


def test_a_checkpoint_of_a_run_is_published_without_its_training(hub: type[Hub], tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    model = Tied(width=3)
    trainer.fit(model, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    push_to_hub(tmp_path / "a.ckpt", "me/run")
    assert "trained for 4 steps" in hub.files["me/run"]["README.md"].decode()
    from safetensors.torch import load

    assert set(load(hub.files["me/run"]["model.safetensors"])) == {
        "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"
    }  # fmt: skip
    assert_same(load_from_hub(Tied, "me/run"), model)


def test_a_plain_module_takes_its_arguments_from_the_caller(hub: type[Hub]) -> None:
    model = nn.Linear(2, 3)
    push_to_hub(model, "me/linear")
    assert_same(load_from_hub(nn.Linear, "me/linear", in_features=2, out_features=3), model)
    with pytest.raises(ArgumentTypeError, match="in_features"):
        load_from_hub(nn.Linear, "me/linear")


def test_what_json_does_not_have_must_be_passed(hub: type[Hub]) -> None:
    with pytest.warns(UserWarning, match="not published: act; pass them"):
        push_to_hub(Tied(width=3, act=torch.float16), "me/act")
    with pytest.raises(ArgumentTypeError, match=r"act was torch\.float16"):
        load_from_hub(Tied, "me/act")
    assert load_from_hub(Tied, "me/act", act=torch.float16).act is torch.float16


def test_a_config_that_cannot_be_reached_is_no_missing_one(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    push_to_hub(Tied(width=3, lr=0.5), "me/tied")
    weights = Path(huggingface_hub.hf_hub_download("me/tied", "model.safetensors"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"config\.json of 'me/tied' could not be downloaded"):
        load_from_hub(Tied, "me/tied", width=3)
    known = weights.parents[2] / ".no_exist" / SHA / "config.json"  # as huggingface_hub notes it
    known.parent.mkdir(parents=True)
    known.touch()
    assert load_from_hub(Tied, "me/tied", width=3).hparams["lr"] == 0.1


def test_secrets_among_hyperparameters_are_not_published(tmp_path: Path) -> None:
    class WithKey(Tied):
        def __init__(self, api_key: str, service: Any, client: Any, image_token: str = "<image>") -> None:
            super().__init__(width=3)
            self.save_hyperparameters(ignore=["width", "lr", "act"])

    class Client:
        def __repr__(self) -> str:
            return "Client(password='not-for-you')"

    module = WithKey("not-for-you", {"url": "s3://me:not-for-you@host/x"}, Client())
    with pytest.warns(UserWarning, match="not published: client, api_key, service;"):
        write_hub_files(module, tmp_path, repo_id="me/key")
    assert b"not-for-you" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert json.loads((tmp_path / "config.json").read_text())["image_token"] == "<image>"


class Counting(Net):
    def get_extra_state(self) -> Any:
        return {"count": 3}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("it is not published")


def test_extra_states_are_left_out_and_named(hub: type[Hub], tmp_path: Path) -> None:
    model = Counting()
    with pytest.warns(UserWarning, match="not published: _extra_state; load_from_hub needs strict=False"):
        push_to_hub(model, "me/counting")
    card = hub.files["me/counting"]["README.md"].decode()
    assert "- without _extra_state" in card
    assert "load_from_hub(Counting, 'me/counting', strict=False)" in card
    again = load_from_hub(Counting, "me/counting", strict=False)
    for one, other in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(CheckpointError, match="_extra_state"):
        load_from_hub(Counting, "me/counting")


def test_a_name_without_an_owner_is_the_users(hub: type[Hub]) -> None:
    assert str(push_to_hub(nn.Linear(2, 3), "linear", token="hf_x")).endswith(f"me/linear/commit/{SHA}")
    assert "load_from_hub(Linear, 'me/linear')" in hub.files["me/linear"]["README.md"].decode()


def test_a_wrong_name_is_refused_before_anything_is_written(hub: type[Hub]) -> None:
    for wrong in ("a/b/c", "me/two words", "linear"):  # the last without a token
        with pytest.raises(CheckpointError, match="could not be published"):
            push_to_hub("no_such.ckpt", wrong)
    assert hub.created == {}


def test_files_with_code_are_never_read(hub: type[Hub]) -> None:
    hub.files["me/pickle"] = {"pytorch_model.bin": b"\x80\x04cos\nsystem\n.", "config.json": b"{}"}
    with pytest.raises(CheckpointError, match=r"no model\.safetensors.*can contain code"):
        load_from_hub(Tied, "me/pickle")
    assert not [one for one in hub.asked if "pytorch_model.bin" in one]
    hub.files["me/bad"] = {"model.safetensors": b"\x80\x04cos\nsystem\n.", "config.json": b"{}"}
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        load_from_hub(Tied, "me/bad")


def test_a_config_names_no_class_to_import(hub: type[Hub]) -> None:
    push_to_hub(Tied(width=3), "me/config")
    config = {"width": 3, "act": {"class_path": "subprocess.Popen", "init_args": {"args": ["false"]}}}
    own = {"_instantiator": "lightning.pytorch.cli.instantiate_module"}
    hub.files["me/config"]["config.json"] = json.dumps({**config, "_loopwright": own}).encode()
    with pytest.raises(ConfigError, match=r"subprocess\.Popen"):
        load_from_hub(Tied, "me/config")


def test_a_config_that_is_no_object_is_refused(hub: type[Hub]) -> None:
    push_to_hub(Tied(width=3), "me/list")
    hub.files["me/list"]["config.json"] = b"[1]"
    with pytest.raises(CheckpointError, match="not a JSON object"):
        load_from_hub(Tied, "me/list", width=3)


def test_a_missing_repository_is_named(hub: type[Hub]) -> None:
    with pytest.raises(CheckpointError, match=r"'me/none' could not be downloaded(.|\n)*HF_TOKEN"):
        load_from_hub(Tied, "me/none")
    with pytest.raises(CheckpointError, match="could not be published"):
        push_to_hub(Tied(width=3), "not a name")


def test_a_cut_connection_is_an_error_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*args: object, **options: object) -> None:
        raise huggingface_hub.errors.HfHubHTTPError.__bases__[0]("peer closed connection")  # the HTTP library's error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cut)
    with pytest.raises(CheckpointError, match="could not be downloaded: peer closed connection"):
        load_from_hub(nn.Linear, "me/net")


def test_the_files_can_be_looked_at_first(tmp_path: Path) -> None:
    write_hub_files(Tied(width=3), tmp_path / "new", repo_id="me/tied")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"model.safetensors", "config.json", "README.md"}


def test_ranks_above_zero_publish_nothing(hub: type[Hub], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert push_to_hub(Tied(width=3), "me/tied") is None
    assert hub.asked == []


def test_huggingface_hubs_own_mixin_reads_the_files(hub: type[Hub]) -> None:
    class Plain(nn.Module, huggingface_hub.PyTorchModelHubMixin):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.layer = nn.Linear(width, 1)

    class Own(lw.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(width, 1)

    model = Own(3)
    push_to_hub(model, "me/own")
    assert_same(Plain.from_pretrained("me/own"), model)


def test_a_checkpoint_is_read_at_its_hf_address(hub: type[Hub], tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    model = Tied(width=3)
    trainer.fit(model, loader())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    hub.files["me/run"] = {"last.ckpt": (tmp_path / "last.ckpt").read_bytes()}
    assert_same(Tied.load_from_checkpoint("hf://me/run/last.ckpt"), model)
    resumed = quiet(max_epochs=2)
    resumed.fit(Tied(width=3), loader(), ckpt_path="hf://me/run/last.ckpt")
    assert resumed.global_step == 8
    with pytest.raises(FileNotFoundError, match=r"none\.ckpt"):
        Tied.load_from_checkpoint("hf://me/run/none.ckpt")
