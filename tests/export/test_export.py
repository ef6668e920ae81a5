from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from folders import rows_file
from shearling.checkpoint.pretrained import load_model
from shearling.cli import run as command
from shearling.errors import CheckFailed, InputError, OutputError
from shearling.export.check import TOLERANCE, check
from shearling.export.graph import reference
from shearling.export.inputs import inputs_from_tokenizer
from shearling.workflows.export import FORMATS, example_inputs, export_model
from tiny import batches_of, inputs_of, model_of


def needs_onnx() -> None:
    for name in FORMATS["onnx"].NEEDED:  # type: ignore[attr-defined]
        pytest.importorskip(name, reason="the ONNX tests need shearling[export]")


@pytest.fixture(scope="module")
def onnx_file(pruned: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The pruned model, two of its sublayers empty, exported through the command line."""
    needs_onnx()
    out = tmp_path_factory.mktemp("onnx") / "model.onnx"
    result = export_model(str(pruned), out, rounds=3)
    return out, result.to_json()


def test_the_file_is_the_model_at_any_batch_and_length(pruned: Path, onnx_file: tuple[Path, dict[str, Any]]) -> None:
    model = load_model(str(pruned), device="cpu")
    run = FORMATS["onnx"].open_runner(onnx_file[0])
    for size, length in ((1, 1), (1, 7), (5, 3), (2, 40)):
        inputs = inputs_of(batches_of(1, size, max(length, 3))[0])
        inputs = {k: v[:, :length] for k, v in inputs.items()} | {"token_type_ids": torch.zeros(size, length).long()}
        with torch.no_grad():
            expected = model(**inputs).logits
        np.testing.assert_allclose(run(inputs)["logits"], expected.numpy(), atol=1e-4)


def test_it_reports_the_difference_and_the_dense_model(onnx_file: tuple[Path, dict[str, Any]], dense: Path) -> None:
    out, said = onnx_file
    assert [p.name for p in out.parent.iterdir()] == ["model.onnx"]
    assert b".py" not in out.read_bytes()  # no stack trace, no path of this machine
    assert said["inputs"]["input_ids"] == ["batch", "length"]
    assert said["outputs"] == ["logits"]
    assert 0 <= said["max_difference"] < 1e-4
    assert said["check"]["agreement"] == 1
    assert said["exported"]["bytes"] == out.stat().st_size < said["dense"]["bytes"]
    assert Path(said["dense"]["model"]).resolve() == dense.resolve()
    assert said["exported"]["latency"]["milliseconds"] > 0
    json.dumps(said)


def test_quantisation_shrinks_the_file_and_stays_close(
    pruned: Path, onnx_file: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    from shearling.export.onnx import open_runner, quantise

    quantise(onnx_file[0], tmp_path / "int8.onnx")
    assert (tmp_path / "int8.onnx").stat().st_size < onnx_file[0].stat().st_size
    model = load_model(str(pruned), device="cpu")
    batches = example_inputs(model, str(pruned), None, None)
    found = check(open_runner(tmp_path / "int8.onnx"), batches, reference(model, batches), precision="int8")
    assert 0 < found.mean < TOLERANCE["int8"]


def test_half_precision_of_a_dense_model_from_the_command_line(
    dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_onnx()
    out, data = tmp_path / "half.onnx", rows_file(tmp_path / "rows.jsonl", labels=False)
    assert command(["export", str(dense), "--out", str(out), "--fp16", "--data", str(data), "--json", "--quiet"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["precision"] == "float16"
    assert said["dense"] is None
    assert 0 < said["check"]["relative"] < TOLERANCE["float16"]
    weights = sum(p.numel() for p in load_model(str(dense)).parameters())
    assert out.stat().st_size < 2 * weights + 2**17  # two bytes a weight, and the graph


def test_exported_programs(pruned: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.pt2"
    alone = shutil.copytree(pruned, tmp_path / "away" / "from" / "dense")
    result = export_model(str(alone), out, format="exported", rounds=3)
    assert result.dense is None
    assert result.difference.largest < 1e-4
    program = torch.export.load(out).module()
    inputs = inputs_of(batches_of(1, 3, 9)[0]) | {"token_type_ids": torch.zeros(3, 9).long()}
    model = load_model(str(pruned), device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(program(**inputs)["logits"], model(**inputs).logits)


def test_a_failed_check_leaves_nothing(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = FORMATS["exported"]
    monkeypatch.setattr(kind, "write", lambda model, inputs, outputs, path, precision: path.write_bytes(b"wrong"))
    monkeypatch.setattr(kind, "open_runner", lambda path: lambda i: {"logits": np.ones((len(i["input_ids"]), 2))})
    with pytest.raises(CheckFailed, match="Nothing was written"):
        export_model(str(dense), tmp_path / "model.pt2", format="exported")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [np.nan, 0.5])
def test_the_check_fails_on_wrong_outputs(wrong: float) -> None:
    model = model_of("bert")
    batches = inputs_from_tokenizer(model, None)
    expected = reference(model, batches)
    answers = iter(expected)

    def off(inputs: Any) -> dict[str, Any]:
        values = {k: v.numpy().copy() for k, v in next(answers).items()}
        values["logits"][0, 0] += wrong
        return values

    with pytest.raises(CheckFailed, match="differs from PyTorch"):
        check(off, batches, expected, precision="float32")


def test_the_check_fails_on_a_shape_that_does_not_follow() -> None:
    model = model_of("bert")
    batches = inputs_from_tokenizer(model, None)
    expected = reference(model, batches)
    stuck = {k: v.numpy() for k, v in expected[0].items()}
    with pytest.raises(CheckFailed, match="PyTorch gives"):
        check(lambda inputs: stuck, batches, expected, precision="float32")


def test_padding_may_hold_anything() -> None:
    model = model_of("bert", head="")
    batches = inputs_from_tokenizer(model, None)
    expected = [{"last_hidden_state": e["last_hidden_state"]} for e in reference(model, batches)]
    pairs = iter(zip(batches, expected, strict=True))

    def noisy(inputs: Any) -> dict[str, Any]:
        batch, wanted = next(pairs)
        padding = (batch["attention_mask"] == 0)[..., None]
        return {"last_hidden_state": wanted["last_hidden_state"].masked_fill(padding, 1e6).numpy()}

    assert check(noisy, batches, expected, precision="float32").largest == 0


@pytest.mark.parametrize(
    ("head", "names"), [("QuestionAnswering", {"start_logits", "end_logits"}), ("MaskedLM", {"logits"})]
)
def test_outputs_are_named_after_the_head(head: str, names: set[str]) -> None:
    model = model_of("bert", head=head)
    assert set(reference(model, inputs_from_tokenizer(model, None))[0]) == names


def test_wrong_use(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="No format 'tflite'"):
        export_model(str(dense), tmp_path / "x", format="tflite")
    with pytest.raises(InputError, match="--format onnx"):
        export_model(str(dense), tmp_path / "x.pt2", format="exported", precision="int8")
    with pytest.raises(OutputError, match="is a directory"):
        export_model(str(dense), tmp_path, format="exported")
    (tmp_path / "there").touch()
    with pytest.raises(OutputError, match="exists"):
        export_model(str(dense), tmp_path / "there", format="exported")
    assert command(["export", str(dense), "--out", str(tmp_path / "x"), "--fp16", "--int8"]) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["there"]
