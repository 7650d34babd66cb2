"""A small training that saves and logs to a bucket; killed before a request to the store, or run to its end.

`python s3_program.py '{"root": "s3://...", "epochs": 4, ...}'` prints the weights' digest as its last line. Used by
test_s3.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from typing import Any

import fsspec
from toys import ValidatedNet, adam, loader, net, quiet

import loopwright as lw

_WRITES = {"put_object", "copy_object", "delete_object", "upload_part", "complete_multipart_upload"}


def kill_before(root: str, number: int) -> None:
    """Kill this process and its other ranks before the request of this number that changes a checkpoint."""
    store = type(fsspec.filesystem(root.partition("://")[0]))
    name = "_call_s3" if root.startswith("s3://") else "_request"
    call, seen = getattr(store, name), 0

    async def counted(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        # Google's requests have the name in the address or in the data.
        if (method in _WRITES and "/checkpoints/" in kwargs.get("Key", "")) or (
            name == "_request" and method.upper() != "GET" and "/checkpoints/" in f"{args} {kwargs}"
        ):
            seen += 1
            if seen == number:
                os.killpg(0, signal.SIGKILL)
        return await call(self, method, *args, **kwargs)

    setattr(store, name, counted)


def main(
    root: str,
    *,
    epochs: int,
    ckpt_path: str | None = None,
    is_sharded: bool = False,
    is_async: bool = False,
    logger: str = "csv",
    kill_at: int | None = None,
) -> None:
    if kill_at is not None and not int(os.environ.get("LOCAL_RANK", "0")):
        kill_before(root, kill_at)
    trainer = quiet(
        max_epochs=epochs,
        default_root_dir=root,
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=True,
        callbacks=[lw.ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True)],
        strategy=lw.FSDPStrategy(state_dict_type="sharded") if is_sharded else "auto",
        devices=2 if is_sharded else 1,
        plugins=[lw.AsyncCheckpointIO()] if is_async else [],
    )
    module = net(ValidatedNet, adam)
    trainer.fit(module, loader(16, 2), loader(8, 2), ckpt_path=ckpt_path)
    weights = trainer.full_state_dict(module)
    if trainer.is_global_zero:
        digest = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights)))
        print(digest.hexdigest())


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    main(arguments.pop("root"), **arguments)
