"""`loopwright checkpoint`: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import loopwright as lw
from loopwright.checkpoint import storage
from loopwright.checkpoint.tools.inspection import disk_bytes
from loopwright.checkpoint.tools.verify import check
from loopwright.cli import run
from loopwright.cli.commands.checkpoint_text import ByteMeter, show_bytes

LIGHTNING = Path(__file__).parents[3] / "fixtures" / "lightning-2.6.ckpt"


class Net(lw.Module):
    def __init__(self, width: int = 4, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)
        self.tied = torch.nn.Linear(width, 1, bias=False)
        self.tied.weight = self.layer.weight

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.layer(batch) + self.tied(batch)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "full.ckpt"
    trainer = lw.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[lw.EarlyStopping("train_loss", check_on_train_epoch_end=False)],
    )  # fmt: skip
    trainer.fit(Net(), [torch.randn(2, 4) for _ in range(3)])
    trainer.save_checkpoint(path)
    return path


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*words: str | Path) -> tuple[int, str, str]:
        code = run(["checkpoint", *map(str, words)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


Call = Callable[..., tuple[int, str, str]]


def test_inspect_says_what_is_in_it(trained: Path, call: Call) -> None:
    code, said, _ = call("inspect", trained)
    assert code == 0
    assert said.startswith(f"{trained}: checkpoint, ")
    for text in (
        f"written by    loopwright {lw.__version__}, torch {torch.__version__}",
        "counts        epoch 1, global step 3",
        "weights       3 tensors, 5 elements, 20 B, 1 tied",
        "float32: 5 elements, 20 B",
        "optimizer 0   Adam, AdamW or alike, inferred from its state; 2 parameters with state, 48 B",
        "2 parameters: lr=0.01, betas=[0.9, 0.999]",
        "hparams       width = 4\n                lr = 0.1",
        "states        progress",
    ):
        assert text in said
    code, said, _ = call("inspect", trained, "--json", "--key", "state_dict")
    found = json.loads(said)
    assert found["counts"]["samples"] == 6
    assert [entry["path"] for entry in found["tensors"]] == [f"state_dict/{name}" for name in Net().state_dict()]
    assert found["tensors"][2]["same_as"] == "state_dict/layer.weight"
    code, said, _ = call("inspect", trained, "--key", "hyper_parameters/lr")
    assert said == "  hyper_parameters/lr: 0.1\n"
    code, said, _ = call("inspect", LIGHTNING, "--tensors")
    assert "Lightning checkpoint" in said
    assert "written by    lightning 2.6.6" in said
    assert "  optimizer_states/0/state/0/exp_avg " in said


def test_what_is_converted_comes_back(trained: Path, call: Call, tmp_path: Path) -> None:
    sharded, one, weights = tmp_path / "sharded.ckpt", tmp_path / "one.ckpt", tmp_path / "weights.safetensors"
    code, said, _ = call("convert", trained, sharded, "--to", "sharded", "--shards", "2")
    assert code == 0
    assert said.startswith(f"{sharded}: sharded, ")
    assert call("consolidate", sharded, one)[0] == 0
    for other in (sharded, one):
        assert call("diff", trained, other) == (0, "equal\n", "")
    assert call("convert", one, weights, "--map", "layer.=net.")[0] == 0
    code, said, _ = call("diff", weights, one, "--weights-only")
    assert code == 1
    assert "only in A state_dict/net.weight: tensor (1, 4) float32\n" in said
    assert said.startswith("4 differ: 2 only in A, 2 only in B\n")
    tied = '  metadata      format = pt\n                loopwright.tied = {"tied.weight": "net.weight"}\n'
    assert call("inspect", weights)[1].endswith(tied)
    code, said, _ = call("inspect", sharded)
    assert "saved by ranks 2, sharded tensors 6" in said
    code, said, _ = call("verify", trained, tmp_path)
    assert code == 0
    assert [line.partition(": ")[0] for line in said.splitlines()] == [str(p) for p in (trained, one, sharded, weights)]


def test_verify_names_what_is_damaged_and_goes_on(call: Call, tmp_path: Path) -> None:
    weight = torch.arange(1000.0)
    storage.save({"state_dict": {"a": weight}}, tmp_path / "a.ckpt")
    storage.save({"state_dict": {"a": weight}}, tmp_path / "b.ckpt")
    content = bytearray((tmp_path / "a.ckpt").read_bytes())
    content[content.find(bytes(weight[500:600].untyped_storage())[2000:2400]) + 7] ^= 1
    (tmp_path / "a.ckpt").write_bytes(content)
    code, said, _ = call("verify", tmp_path)
    assert code == 1
    first, reason, second = said.splitlines()
    assert first == f"{tmp_path / 'a.ckpt'}: DAMAGED"
    assert "checkpoint['state_dict']['a']" in reason
    assert second.startswith(f"{tmp_path / 'b.ckpt'}: ok, every byte")
    assert call("convert", tmp_path / "a.ckpt", tmp_path / "c.ckpt")[0] == 2
    assert not (tmp_path / "c.ckpt").exists()
    torch.save({"a": weight}, tmp_path / "plain.pt")
    assert "no digest" in call("verify", tmp_path / "plain.pt")[1]


def test_verify_tells_what_it_cannot_read_from_what_is_damaged(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    storage.save({"state_dict": {}}, "whole.ckpt")
    Path("loop.ckpt").symlink_to("loop.ckpt")
    os.mkfifo("pipe.ckpt")
    Path("empty.ckpt").touch()
    code, said, problem = call("verify", "gone.ckpt", "loop.ckpt", "whole.ckpt")
    assert code == 2
    assert said.startswith("whole.ckpt: ok")
    assert "there is no checkpoint at 'gone.ckpt'" in problem
    assert "'loop.ckpt' cannot be read: Too many levels" in problem
    code, said, _ = call("verify", "pipe.ckpt", "empty.ckpt", "whole.ckpt")
    assert code == 1
    assert "is a pipe, a socket or a device" in said
    assert "empty.ckpt: DAMAGED" in said
    code, _, problem = call("verify", "nosuch://a/b.ckpt")
    assert code == 2
    assert "Protocol not known" in problem


@pytest.mark.parametrize("command", ["inspect", "diff"])
def test_a_look_at_a_damaged_file_says_how_it_is_damaged(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    storage.save({"state_dict": {"a": torch.arange(1000.0)}}, "whole.ckpt")
    content = Path("whole.ckpt").read_bytes()
    for changed, expected in (
        (content[: len(content) // 2], "is damaged: it is truncated: it has"),
        (b"", "is damaged: it is truncated: it has 0 bytes"),
        (b"hello world, and more" * 9, "is not a checkpoint (it begins with b'hello world, and'"),
    ):
        Path("a.ckpt").write_bytes(changed)
        code, _, problem = call(command, *["a.ckpt", "whole.ckpt"][: 2 if command == "diff" else 1])
        assert code == 2
        assert expected in problem


def test_diff_tells_values_apart_up_to_a_tolerance(call: Call, tmp_path: Path) -> None:
    for name, shift in (("a.pt", 0.0), ("b.pt", 1e-3)):
        torch.save({"w": torch.arange(4.0) + shift}, tmp_path / name)
    both = tmp_path / "a.pt", tmp_path / "b.pt"
    code, said, _ = call("diff", *both, "--values", "1")
    assert (code, said.splitlines()[0]) == (1, "1 differ: 1 values")
    assert "state_dict/w: 4 of 4 elements differ, by at most 0.001; (0,): 0.0 != 0.001" in said
    assert call("diff", *both, "--atol", "0.01") == (0, "equal within the tolerance\n", "")


def test_nothing_is_overwritten_unless_it_is_said(trained: Path, call: Call, tmp_path: Path) -> None:
    target = tmp_path / "there.safetensors"
    target.write_text("mine")
    code, said, problem = call("convert", trained, target)
    assert (code, said) == (2, "")
    assert "which exists" in problem
    assert target.read_text() == "mine"
    assert call("convert", trained, target, "--force")[0] == 0
    assert call("convert", trained, trained, "--force")[0] == 2
    assert storage.verify(trained).sealed


def test_what_is_read_and_what_is_written_lie_apart(
    trained: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("convert", trained, "folder.ckpt", "--to", "sharded")[0] == 0
    before = sorted(os.listdir("folder.ckpt"))
    for command in (["consolidate"], ["convert", "--to", "checkpoint"]):
        for target in ("folder.ckpt/whole.ckpt", "./folder.ckpt/../folder.ckpt/below/whole.ckpt"):
            code, _, problem = call(*command, "folder.ckpt", target, "--force")
            assert (code, "outside of the input" in problem) == (2, True)
    shard = next(Path("folder.ckpt").glob("shard-*"))
    assert "outside of the input" in call("convert", shard, "folder.ckpt", "--to", "sharded", "--force")[2]
    assert "outside of the input" in call("consolidate", "memory://a/b.ckpt", "memory://a/b.ckpt/c.ckpt")[2]
    assert sorted(os.listdir("folder.ckpt")) == before
    assert call("consolidate", "folder.ckpt", "folder.ckpt-whole.ckpt")[0] == 0


def test_verify_says_how_far_it_is(trained: Path, call: Call, tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "folder.ckpt"
    assert call("convert", trained, folder, "--to", "sharded")[0] == 0
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for path in (trained, folder):
        code, said, shown = call("verify", path)
        assert (code, said.startswith(f"{path}: ok, every byte")) == (0, True)
        assert re.match(re.escape(f"\r{path}: read ") + r"[\d.]+ k?B of [\d.]+ kB\x1b\[K", shown), shown
        read: list[int] = []
        check(path, read.append)
        assert 0.3 * disk_bytes(path) < sum(read) <= disk_bytes(path)


def test_objects_are_left_out_or_trusted_when_asked(call: Call, tmp_path: Path) -> None:
    source, target = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    torch.save({"state_dict": {"w": torch.ones(1)}, "job": range(3), "epoch": 1}, source)
    code, _, problem = call("convert", source, target)
    assert code == 2
    assert "1 entries that are not tensors or plain values: job" in problem
    code, _, problem = call("convert", source, target, "--drop-objects")
    assert (code, problem) == (0, "loopwright checkpoint convert: omitted job, which is not a plain value\n")
    assert "omitted       job: not a plain value" in call("inspect", source)[1]
    assert "--trust unpickles objects in files" in call("inspect", source, "--trust")[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "nowhere.ckpt"], "there is no checkpoint at 'nowhere.ckpt'"),
        (["verify", "nowhere.ckpt"], "there is no checkpoint at 'nowhere.ckpt'"),
        (["inspect", "."], "is a folder without manifest.json or .metadata"),
        (["verify", "empty"], "Expected a checkpoint in empty"),
        (["convert", "a.pt", "b.bin"], "has the suffix '.bin'"),
        (["convert", "a.pt", "b.pt", "--map", "x"], "Expected --map OLD=NEW, got x"),
        (["convert", "a.pt", "b.pt", "--map", "x=y"], "no weight has a name that begins so"),
        (["consolidate", "a.pt", "b.ckpt"], "in one file"),
        (["inspect", "memory://a/b.safetensors"], "are read from local files only"),
        (["convert", "nested.pt", "b.safetensors"], "it has tensors under ['ema/net']"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str], message: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(1)}, "a.pt")
    torch.save({"ema": {"net": {"w": torch.ones(1)}}}, "nested.pt")
    Path("empty").mkdir()
    code, said, problem = call(*words)
    assert (code, said) == (2, "")
    assert problem.startswith(f"loopwright checkpoint {words[0]}: ")
    assert message in problem
    assert "To fix it: " in problem


@pytest.mark.parametrize(
    "words", [[], ["look"], ["diff", "a", "b", "--rtol", "-1"], ["convert", "a", "b", "--shards", "0"]]
)
def test_wrong_options_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(["checkpoint", *words])


def test_long_work_is_shown_on_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    with ByteMeter("written", 2_000_000) as meter:
        meter.advance(1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with ByteMeter("written", 2_000_000) as meter:
        meter.advance(1_000_000)
        meter.advance(1)  # too soon to be shown
    assert capsys.readouterr().err == "\rwritten 1.0 MB of 2.0 MB\x1b[K\r\x1b[K"
    assert [show_bytes(count) for count in (0, 999, 1500, 3 * 10**15)] == ["0 B", "999 B", "1.5 kB", "3000.0 TB"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12, of a fork beside threads
@pytest.mark.parametrize("words", [["convert", "--to", "sharded"], ["convert"], ["consolidate"]])
def test_a_kill_while_it_writes_leaves_the_old_one_and_the_next_call_cleans_up(
    words: list[str], trained: Path, call: Call, tmp_path: Path
) -> None:
    source, target = tmp_path / "source.ckpt", tmp_path / "place" / "target.ckpt"
    target.parent.mkdir()
    assert call("convert", trained, source, "--to", "sharded", "--shards", "2")[0] == 0
    command = [*words, str(source), str(target), "--force"]
    assert call(*command)[0] == 0

    def names() -> set[str]:
        return {str(path.relative_to(target.parent)) for path in target.parent.rglob("*")}

    def die_at(stage: str) -> None:
        def look(event: str, arguments: tuple[Any, ...]) -> None:
            is_here = any(str(target.parent) in str(one) for one in arguments)
            if is_here and event == stage and (event != "open" or arguments[2] & os.O_CREAT):
                os.kill(os.getpid(), signal.SIGKILL)

        def advance(self: ByteMeter, count: int) -> None:
            if stage == "middle":
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(look)
        ByteMeter.advance = advance  # type: ignore[method-assign]
        run(["checkpoint", *command])

    for stage in ("open", "middle", "os.rename"):
        before = names()
        child = os.fork()
        if child == 0:
            try:
                die_at(stage)
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, stage
        assert before <= names()
        assert call("diff", source, target)[:2] == (0, "equal\n"), stage
        assert (call("verify", target)[0], stage) == (0, stage)
        assert call(*command)[0] == 0
        assert len(names()) == len(before), stage
