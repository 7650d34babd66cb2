"""The Hugging Face Hub: publish weights with a model card, and build a module from published weights.

A repository has `model.safetensors`, `config.json` (hyperparameters, as JSON) and `README.md`, the layout of
huggingface_hub's own PyTorchModelHubMixin. Weights are read from safetensors only, which cannot contain code.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from .. import __version__
from ..checkpoint import hparams
from ..checkpoint.file.safetensors_file import read_weights, write_weights
from ..checkpoint.rebuild import rebuild
from ..checkpoint.tensors import is_tensor, read_tensor
from ..checkpoint.tools.convert import weights_of
from ..checkpoint.tools.formats import Opened, Reading, open_checkpoint
from ..errors import CheckpointError, ConfigError, MissingDependency
from ..messages import current_rank, warn
from ..protocols import MapLocation, StateDict, TrustedClasses
from ..strategies.base import plain_name
from ..strategies.distributed.shards import is_sharded
from ..trainer.checkpointing.program import hide_secrets, is_secret
from ..yaml_file import write as to_yaml

try:
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils._validators import validate_repo_id
except ModuleNotFoundError as error:
    raise MissingDependency("huggingface_hub", needed_for="loopwright.integrations.hub") from error

__all__ = ["load_from_hub", "push_to_hub", "write_hub_files"]

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"

_EXTRA = "_extra_state"  # torch's name of what a module's get_extra_state returns
_OWN = "_loopwright"  # entry of config.json: what load_from_checkpoint knows about hyperparameters from a checkpoint
_FIX = "check the name, the token (`hf auth login`, or HF_TOKEN), and the network; HF_ENDPOINT is the hub's address."

# The bases of HfHubHTTPError are the HTTP library's errors, such as a cut connection.
_FAILURES: tuple[type[Exception], ...] = (
    *cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__),
    EntryNotFoundError,
    HFValidationError,
    OSError,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def push_to_hub(
    source: nn.Module | str | Path,
    repo_id: str,
    *,
    metrics: Mapping[str, float] | None = None,
    description: str = "",
    private: bool = True,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | None = None,
) -> str | None:
    """Publish weights, hyperparameters and a model card in one commit. Called on any number of ranks; rank 0 uploads.

    `write_hub_files` writes the same files to a folder, to look at them before.

    Args:
        source: A module, or a checkpoint: a file or folder of any format that `loopwright checkpoint` reads.
        repo_id: "owner/name", or "name" for one of the token's user; created if it does not exist.
        metrics: Results for the card, such as `trainer.callback_metrics`.
        description: First paragraph of the card, in Markdown.
        private: Whether a new repository is private. One that exists stays as it is.
        revision: Branch; None is the main one.
        commit_message: None names the version of Loopwright.
        token: Access token; None is the one that huggingface_hub has found.

    Returns:
        URL of the commit; None on other ranks than 0.

    Raises:
        ConfigError: The module's parameters are sharded.
        CheckpointError: The weights cannot be read or written, or the hub refuses them.
    """
    if current_rank():
        return None
    api = huggingface_hub.HfApi(token=token)
    try:  # before the weights are read and written
        validate_repo_id(repo_id)
        repo_id = repo_id if "/" in repo_id else f"{api.whoami()['name']}/{repo_id}"
    except _FAILURES as error:
        raise CheckpointError(f"{repo_id!r} could not be published: {error}", fix=_FIX) from error
    with tempfile.TemporaryDirectory(prefix="loopwright-hub-") as folder:
        write_hub_files(source, folder, repo_id=repo_id, metrics=metrics, description=description)
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message or f"Upload weights with Loopwright {__version__}",
            )
        except _FAILURES as error:
            raise CheckpointError(f"{repo_id!r} could not be published: {error}", fix=_FIX) from error
    return str(commit.commit_url)


def write_hub_files(
    source: nn.Module | str | Path,
    folder: str | Path,
    *,
    repo_id: str,
    metrics: Mapping[str, float] | None = None,
    description: str = "",
) -> None:
    """Write what `push_to_hub` publishes.

    Hyperparameters are written as JSON: a tuple becomes a list. What JSON does not have is left out with a warning, and
    so are texts with the name or the form of a secret: `api_key`, `hf_...`, logins in URLs. Modules' extra states that
    are not tensors are left out with a warning, too.

    Args:
        source: A module or a checkpoint; see `push_to_hub`.
        folder: Where; made if necessary.
        repo_id: "owner/name", for the card.
        metrics: Results for the card.
        description: First paragraph of the card.

    Raises:
        ConfigError: The module's parameters are sharded.
        CheckpointError: The weights cannot be read or written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # torch.compile puts its own class around the module.
    name = type(getattr(source, "_orig_mod", source)).__name__ if isinstance(source, nn.Module) else "YourModule"
    opened = _opened(source)
    weights = {plain_name(key): value for key, value in weights_of(opened).items()}
    left_out = [key for key, value in weights.items() if key.endswith(_EXTRA) and not is_tensor(value)]
    weights = {key: value for key, value in weights.items() if key not in left_out}
    write_weights(weights, folder / WEIGHTS)
    if left_out:
        warn(
            f"states that are not tensors are not published: {', '.join(left_out)}; load_from_hub needs strict=False, "
            "and set_extra_state is not called"
        )
    config = _config_of(opened.tree)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    card = _card(name, repo_id, opened.tree, config, weights, metrics or {}, description, left_out)
    (folder / CARD).write_text(card, encoding="utf-8")


def load_from_hub(
    cls: type[ModuleT],
    repo_id: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    map_location: MapLocation = None,
    strict: bool | None = None,
    trusted_classes: TrustedClasses = (),
    **kwargs: object,
) -> ModuleT:
    """Build a module from a repository's hyperparameters and load its weights, from safetensors only.

    Files that were downloaded before are not downloaded again.

    Args:
        cls: Class of the module; also a plain `nn.Module`.
        repo_id: "owner/name".
        revision: Branch, tag or commit; a commit's hash pins what is loaded.
        token: Access token; None is the one that huggingface_hub has found.
        map_location: Device for the tensors; None is the CPU.
        strict: Whether names must match exactly; None is the module's `strict_loading`.
        trusted_classes: See `Module.load_from_checkpoint`.
        kwargs: Arguments of `__init__`; they take precedence over the published ones.

    Raises:
        ConfigError: An argument of `__init__` is neither published nor passed.
        CheckpointError: There is no such repository, or it has no `model.safetensors`, or the weights do not fit.
    """
    path = _download(repo_id, WEIGHTS, revision, token)
    if path is None:
        raise CheckpointError(
            f"The repository {repo_id!r} has no {WEIGHTS}. Other formats can contain code and are not read.",
            fix="publish with push_to_hub, or convert a file that you trust with `loopwright checkpoint convert`.",
        )
    found, _ = read_weights(path)
    location = torch.device("cpu" if map_location is None else str(map_location))
    checkpoint: StateDict = {"state_dict": {key: read_tensor(value).to(location) for key, value in found.items()}}
    config = _download(repo_id, CONFIG, path.parent.name, token)  # of the commit that the weights are from
    if config is not None:
        checkpoint.update(_entries_of(config, repo_id))
    return rebuild(
        cls, checkpoint, f"hf://{repo_id}", map_location, None, strict=strict, trusted_classes=trusted_classes,
        overrides=kwargs,
    )  # fmt: skip


def _opened(source: nn.Module | str | Path) -> Opened:
    """Return weights and hyperparameters as a checkpoint has them; tensors of files are not read yet."""
    if not isinstance(source, nn.Module):
        return open_checkpoint(source, Reading(drop_objects=True))
    if any(is_sharded(value) for value in source.parameters()):
        raise ConfigError(
            f"The parameters of {type(source).__name__} are sharded over ranks, and a repository has full ones.",
            fix="publish a checkpoint: push_to_hub(trainer.checkpoint_callback.best_model_path, ...).",
        )
    entries = hparams.write(source, "") if hasattr(source, "hparams") else {}
    return Opened(type(source).__name__, "module", {"state_dict": source.state_dict(), **entries})


def _config_of(tree: StateDict) -> dict[str, Any]:  # Any: values of JSON
    """Return the hyperparameters of a checkpoint as config.json has them."""
    saved = dict(tree.get("hyper_parameters") or {})
    to_pass = dict(tree.get(hparams.to_pass_key("")) or {})
    own = {"_instantiator": saved.pop(hparams.INSTANTIATOR, None), "hparams_name": tree.get("hparams_name")}
    config: dict[str, Any] = {}
    for name, value in saved.items():
        if is_secret(str(name), value):
            to_pass[str(name)] = "a secret"
            continue
        try:
            json.dumps(value, allow_nan=False)
            config[str(name)] = value
        except (TypeError, ValueError):
            to_pass[str(name)] = hparams.describe(value)
    if to_pass:
        names = ", ".join(to_pass)
        warn(
            f"hyperparameters that JSON does not have, or that seem to be secrets, are not published: {names}; pass "
            "them to load_from_hub"
        )
    own["to_pass"] = {key: hide_secrets([str(value)])[0] for key, value in to_pass.items()} or None
    own = {key: value for key, value in own.items() if value is not None and value != "kwargs"}
    return {**config, _OWN: own} if own else config


def _entries_of(path: Path, repo_id: str) -> StateDict:
    """Return the entries of a checkpoint for a config.json."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        own = config.pop(_OWN, {})
        if "_instantiator" in own:
            config[hparams.INSTANTIATOR] = str(own["_instantiator"])
        entries: StateDict = {"hyper_parameters": config, "hparams_name": str(own.get("hparams_name", "kwargs"))}
        if own.get("to_pass"):
            entries[hparams.to_pass_key("")] = dict(own["to_pass"])
    except (ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"{CONFIG} of {repo_id!r} is not a JSON object of hyperparameters: {error}.", fix="publish it again."
        ) from error
    return entries


def _download(repo_id: str, name: str, revision: str | None, token: str | None) -> Path | None:
    """Return the local copy of a file; None if the repository does not have it."""
    try:
        return Path(huggingface_hub.hf_hub_download(repo_id, name, revision=revision, token=token))
    except _FAILURES as error:
        if _is_absent(error, repo_id, name, revision):
            return None
        raise CheckpointError(f"{name} of {repo_id!r} could not be downloaded: {error}", fix=_FIX) from error


def _is_absent(error: Exception, repo_id: str, name: str, revision: str | None) -> bool:
    """Return whether the hub says that there is no such file, or said so before if it cannot be reached now."""
    if not isinstance(error, LocalEntryNotFoundError):
        return isinstance(error, EntryNotFoundError)
    found = huggingface_hub.try_to_load_from_cache(repo_id, name, revision=revision)
    return found is not None and not isinstance(found, str)


def _card(
    name: str,
    repo_id: str,
    tree: StateDict,
    config: Mapping[str, object],
    weights: Mapping[str, Any],  # Any: tensors, or tensors in a file
    metrics: Mapping[str, float],
    description: str,
    left_out: Sequence[str],
) -> str:
    """Return README.md."""
    sizes = {str(value.dtype).removeprefix("torch."): 0 for value in weights.values()}
    for value in weights.values():
        sizes[str(value.dtype).removeprefix("torch.")] += torch.Size(value.shape).numel()
    facts = [f"{count:,} values of {dtype}" for dtype, count in sizes.items()]
    if "global_step" in tree:
        facts.append(f"trained for {int(tree['global_step']):,} steps")
    if left_out:
        facts.append(f"without {', '.join(left_out)}")
    facts.append(f"Loopwright {__version__}, torch {torch.__version__}")
    shown = {key: value for key, value in config.items() if key != _OWN}
    results = "\n".join(f"| {key} | {float(value):.6g} |" for key, value in metrics.items())
    parts = [
        "---\nlibrary_name: loopwright\ntags:\n- loopwright\n- pytorch\n---",
        f"# {repo_id.rpartition('/')[2]}",
        description.strip(),
        "\n".join(f"- {fact}" for fact in facts),
        f"## Results\n\n| metric | value |\n|---|---|\n{results}" if results else "",
        f"## Hyperparameters\n\n```yaml\n{to_yaml(shown).strip()}\n```" if shown else "",
        "## Use\n\nWith the source of the module's class:\n\n```python\nfrom loopwright.integrations.hub import "
        f"load_from_hub\n\nmodel = load_from_hub({name}, {repo_id!r}{', strict=False' if left_out else ''})\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"
