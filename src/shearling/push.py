"""Publish a pruned model on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shearling.checkpoint.load import read_json, read_record
from shearling.errors import CheckpointError, InputError

HIDDEN = [".*", "**/.*", "*.part"]


@dataclass(frozen=True)
class Pushed:
    """Where it went."""

    repo_id: str
    url: str
    files: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        """The fields of `shearling push --json`."""
        return asdict(self)


def push(folder: Path, repo_id: str, *, private: bool = False, api: Any = None) -> Pushed:
    """Create the repository if need be and upload the whole directory in one commit.

    api   a `huggingface_hub.HfApi`; one for the user's own token unless given
    """
    files = published(folder)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    hub = HfApi() if api is None else api
    try:
        url = str(hub.create_repo(repo_id, private=private, exist_ok=True))
        hub.upload_folder(
            repo_id=repo_id,
            folder_path=str(folder),
            commit_message=f"Pruned with shearling: {folder.resolve().name}",
            ignore_patterns=HIDDEN,
        )
    except HFValidationError as error:
        raise InputError(f"'{repo_id}' is no name for a repository: {_first_line(error)}") from None
    except Exception as error:
        raise InputError(_what_to_do(error, repo_id)) from error
    return Pushed(repo_id, url, len(files), sum(path.stat().st_size for path in files))


def published(folder: Path) -> list[Path]:
    """The files that will be uploaded, once it is clear that the checkpoint is whole."""
    read_record(folder)
    read_json(folder / "config.json")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no weights (*.safetensors); nothing was pushed.")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".part")
    return [path for path in files if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _what_to_do(error: Exception, repo_id: str) -> str:
    """What the Hub raised, with the way out."""
    from huggingface_hub import constants

    status = getattr(getattr(error, "response", None), "status_code", None)
    names = {cls.__name__ for cls in type(error).__mro__}
    if status == 401 or "LocalTokenNotFoundError" in names:
        return f"The Hub does not know who you are: `hf auth login`, or set HF_TOKEN, then push {repo_id} again."
    if status == 403:
        return f"Your token may not write to {repo_id}; use one with write access, or another name."
    if status is not None:
        return f"The Hub refused {repo_id} with status {status}: {_first_line(error)}"
    if constants.HF_HUB_OFFLINE or "OfflineModeIsEnabled" in names:
        return "HF_HUB_OFFLINE is set: pushing needs the network. Unset it and push again."
    if names & {"ConnectionError", "ConnectError", "TransportError", "TimeoutException", "OSError"}:
        return f"Cannot reach the Hub ({_first_line(error)}); pushing needs the network. Nothing is lost: push again."
    return f"Could not push {repo_id}: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
