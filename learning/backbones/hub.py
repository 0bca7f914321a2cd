"""Finds checkpoints by name for the operator: a folder on this machine, or else the files of owner/name on the hub.

The operator names these by hand, and afterwards they are in the hub's own cache. A member fetches what a job names with
`learning.backbones.hub_fetch`.

Guarantees: the hub is asked only for names, never for a path. Only files that `learning.backbones.checkpoint` reads are
fetched (safetensors, configs, tokenizers), and no code.
"""

import fnmatch
import re
from pathlib import Path

from learning.backbones.checkpoint import FILES, CheckpointInvalid

__all__ = ["HUB_NAME", "checkpoint_folder", "hub_folder", "hub_size", "pinned_name", "what_the_hub_said"]

HUB_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@([0-9a-f]{40}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SAVE = "name a folder that transformers' save_pretrained wrote"


def checkpoint_folder(base: str) -> Path:
    """The folder of this name, or the folder into which the hub's files were fetched.

    Raises:
        CheckpointInvalid: Neither exists.
    """
    folder = Path(base).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointInvalid(f"{base} is a file; {_SAVE}")
    if not HUB_NAME.fullmatch(base):
        raise CheckpointInvalid(
            f"there is no folder {base}, and a name on the hub is owner/name, such as google-bert/bert-base-uncased; "
            f"{_SAVE}"
        )
    return hub_folder(base)


def hub_folder(name: str) -> Path:
    """The folder into which the hub's files of owner/name, or of owner/name@COMMIT, are fetched if not yet there.

    Raises:
        CheckpointInvalid: The name is invalid, or the hub does not provide it.
    """
    if (match := HUB_NAME.fullmatch(name)) is None:
        raise CheckpointInvalid(f"{name} is not a name on the hub; write owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(match[1], revision=match[2], allow_patterns=list(FILES)))
    except Exception as error:  # From network, hub, name or disk: the library has no common class.
        raise CheckpointInvalid(
            f"{name} is not a folder here, and the hub did not provide it: {what_the_hub_said(error)}. Save it into a "
            "folder (transformers' save_pretrained) and name that"
        ) from error


def hub_size(name: str) -> tuple[int, str | None]:
    """What `hub_folder` would fetch: bytes of all files, and the model's licence as its card states it.

    Raises:
        CheckpointInvalid: The name is invalid, or the hub does not list it.
    """
    if (match := HUB_NAME.fullmatch(name)) is None:
        raise CheckpointInvalid(f"{name} is not a name on the hub; write owner/name")
    from huggingface_hub import HfApi

    try:
        told = HfApi().model_info(match[1], revision=match[2], files_metadata=True)
    except Exception as error:  # From network, hub or name: the library has no common class.
        raise CheckpointInvalid(
            f"the hub did not list {name}: {what_the_hub_said(error)}; check the name and the connection, or save the "
            "model into a folder elsewhere and name that"
        ) from error
    wanted = [each for each in told.siblings or () if any(fnmatch.fnmatch(each.rfilename, one) for one in FILES)]
    licence = getattr(told.card_data, "license", None)
    return sum(each.size or 0 for each in wanted), licence[:200] if isinstance(licence, str) else None


def pinned_name(base: str, folder: Path) -> str:
    """owner/name@COMMIT of what `hub_folder` fetched for a base. The library names its folder by the commit.

    Raises:
        CheckpointInvalid: The folder's name is not a commit.
    """
    match = HUB_NAME.fullmatch(base)
    if match is None or not _COMMIT.fullmatch(folder.name):
        raise CheckpointInvalid(f"the commit of {base} in {folder} is unknown; name owner/name@COMMIT")
    return f"{match[1]}@{folder.name}"


def what_the_hub_said(error: Exception) -> str:
    """An error's reason in one line, without request ids and without advice meant for another program."""
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    match error:
        case GatedRepoError():
            return "its owner requires that you agree to the terms on its page first"
        case RepositoryNotFoundError():
            return "it has no public repository of this name"
        case LocalEntryNotFoundError():
            return "it cannot be reached from here, and no copy was fetched before"
        case _:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return lines[0].strip().rstrip(".")[:300]
