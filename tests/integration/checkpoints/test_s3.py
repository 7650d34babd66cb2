"""Checkpoints and logs in buckets of a server that answers as S3 does (moto's), through s3fs."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loopwright as lw
from loopwright.checkpoint import verify
from loopwright.errors import CheckpointError, ConfigError
from loopwright.report import read_runs

pytest.importorskip("s3fs", reason="s3fs is not installed")
moto_server = pytest.importorskip("moto.server", reason="moto's server is not installed")

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "support" / "s3_program.py"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    import fsspec

    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        fsspec.filesystem("s3").mkdir("runs")
        yield "s3://runs"
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


def store() -> Any:
    import fsspec

    files = fsspec.filesystem("s3")
    files.invalidate_cache()
    return files


def train(root: str, **arguments: Any) -> str:
    """Run the program and return the digest of its weights; "" if it was killed."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), json.dumps({"root": root, **arguments})],
        capture_output=True, text=True, check=False, timeout=300, start_new_session=True,
    )  # fmt: skip
    if "kill_at" in arguments and done.returncode == -signal.SIGKILL:
        return ""
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


@functools.cache
def whole(bucket: str, *, is_sharded: bool = False) -> str:
    """The digest of a run that nothing interrupts."""
    return train(f"{bucket}/whole-{is_sharded}", epochs=4, is_sharded=is_sharded)


@pytest.mark.parametrize(
    "options",
    [{"logger": "csv"}, {"logger": "json_lines", "is_async": True},
     {"logger": "tensorboard", "is_async": True, "is_sharded": True}],
    ids=lambda options: options["logger"],
)  # fmt: skip
def test_a_run_in_a_bucket_resumes_exactly_with_its_logs(bucket: str, options: dict[str, Any]) -> None:
    root = f"{bucket}/{options['logger']}"
    train(root, epochs=2, **options)
    resumed = train(root, epochs=4, ckpt_path="last", **options)
    assert resumed == whole(bucket, is_sharded=options.get("is_sharded", False))
    folder = f"{root}/loopwright_logs/version_0"
    names = {name.rpartition("/")[2] for name in store().ls(f"{folder}/checkpoints", detail=False)}
    assert "last.ckpt" in names
    assert len(names) == 3
    for name in names:
        assert verify(f"{folder}/checkpoints/{name}").sealed
    (run,) = read_runs([folder], checkpoints=False)
    steps = run.series["val_loss"].steps
    assert len(steps) == 4
    assert list(steps) == sorted(set(steps))


# A file is sent, copied to its name, and removed under its first name; a trial of the folder is two requests. The 7th
# and 8th request are the second and third of the first "last.ckpt", the 10th is the second of the next epoch.
@pytest.mark.parametrize(("number", "is_sharded"), [(7, False), (8, False), (10, False), (12, True)])
def test_no_killed_save_leaves_a_torn_checkpoint_that_resume_takes(bucket: str, number: int, is_sharded: bool) -> None:
    root = f"{bucket}/killed-{number}"
    assert train(root, epochs=4, kill_at=number, is_sharded=is_sharded) == ""
    assert train(root, epochs=4, ckpt_path="last", is_sharded=is_sharded) == whole(bucket, is_sharded=is_sharded)
    assert [name for name in store().find(f"{root}/loopwright_logs") if ".tmp-" in name] == []


def test_a_large_checkpoint_is_sent_in_parts(bucket: str) -> None:
    import torch

    from loopwright.checkpoint import load, save

    # s3fs sends what is larger than 100 MB in parts.
    big = torch.arange(30_000_000, dtype=torch.float32)
    save({"state_dict": {"big": big}}, f"{bucket}/big.ckpt")
    assert torch.equal(load(f"{bucket}/big.ckpt")["state_dict"]["big"], big)


def test_a_mistyped_bucket_is_an_error_and_not_made(bucket: str) -> None:
    from toys import loader, net, quiet

    trainer = quiet(max_epochs=1, default_root_dir="s3://rums", enable_checkpointing=True)
    with pytest.raises(ConfigError, match="The specified bucket does not exist"):
        trainer.fit(net(), loader())
    with pytest.raises(CheckpointError, match="The specified bucket does not exist"):
        lw.checkpoint.save({"state_dict": {}}, "s3://rums/a.ckpt")
    assert not store().exists("rums")
