from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shearling.errors import CheckpointError, InputError
from shearling.push import published, push

hub = pytest.importorskip("huggingface_hub")


class StandIn:
    """A Hub in a folder: what HfApi would send to the network goes there."""

    def __init__(self, root: Path, error: Exception | None = None) -> None:
        self.root, self.error, self.private = root, error, None

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        if self.error is not None:
            raise self.error
        assert exist_ok
        self.private = private
        (self.root / repo_id).mkdir(parents=True, exist_ok=True)
        return f"https://hub.invalid/{repo_id}"

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, ignore_patterns: list[str]) -> None:
        paths = [p.relative_to(folder_path).as_posix() for p in Path(folder_path).rglob("*") if p.is_file()]
        for name in hub.utils.filter_repo_objects(paths, ignore_patterns=ignore_patterns):
            target = self.root / repo_id / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(folder_path) / name, target)


def test_what_is_pushed_loads_again(pruned: Path, tmp_path: Path) -> None:
    import shearling

    mine = shutil.copytree(pruned, tmp_path / "mine")
    (mine / ".secret").write_text("no")
    (mine / "weights.part").write_text("half")
    stand_in = StandIn(tmp_path / "hub")
    result = push(mine, "me/small", private=True, api=stand_in)
    there = tmp_path / "hub" / "me" / "small"
    names = sorted(p.name for p in there.iterdir())
    assert names == sorted(p.name for p in published(mine))
    assert ".secret" not in names
    assert "weights.part" not in names
    assert {"README.md", "config.json", "model.safetensors", "shearling.json", "tokenizer.json"} <= set(names)
    assert stand_in.private is True
    assert result.to_json() == {
        "repo_id": "me/small",
        "url": "https://hub.invalid/me/small",
        "files": len(names),
        "bytes": sum(p.stat().st_size for p in there.iterdir()),
    }
    shearling.load(there)


@pytest.mark.parametrize(("status", "words"), [(401, "hf auth login"), (403, "write access"), (500, "status 500")])
def test_refusals_say_what_to_do(pruned: Path, tmp_path: Path, status: int, words: str) -> None:
    error: Any = RuntimeError("refused")
    error.response = SimpleNamespace(status_code=status)
    with pytest.raises(InputError, match=words):
        push(pruned, "me/small", api=StandIn(tmp_path, error))


def test_no_network_is_said_so(pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(InputError, match="Cannot reach the Hub"):
        push(pruned, "me/small", api=StandIn(tmp_path, ConnectionError("no route")))
    with pytest.raises(InputError, match="Cannot reach the Hub"):  # for real: nothing listens on port 9
        push(pruned, "me/small", api=hub.HfApi(endpoint="http://127.0.0.1:9", token="hf_none"))


def test_offline_mode_is_named(pruned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="HF_HUB_OFFLINE"):
        push(pruned, "me/small", api=StandIn(tmp_path, OSError("offline")))


def test_bad_names_and_bad_directories_never_reach_the_hub(pruned: Path, dense: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no name for a repository"):
        push(pruned, "not/a/name", api=hub.HfApi(token="hf_none"))
    with pytest.raises(CheckpointError, match=r"no shearling\.json"):
        push(dense, "me/small", api=StandIn(tmp_path))
    bare = shutil.copytree(pruned, tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weights"):
        push(bare, "me/small", api=StandIn(tmp_path))
