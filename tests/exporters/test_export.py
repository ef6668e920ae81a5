from __future__ import annotations

import json
import shutil
import signal
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shearling
from folders import rows_file
from shearling.checkpoint.pretrained import load_model, load_tokenizer
from shearling.cli import run as command
from shearling.errors import CheckFailed, InputError, ModelError, OutputError
from shearling.exporters.check import TOLERANCE, check
from shearling.exporters.formats import Job
from shearling.exporters.graph import reference
from shearling.exporters.inputs import inputs_from_tokenizer
from shearling.exporters.table import FORMATS, check_suits
from shearling.workflows.export import export_model
from tiny import batches_of, inputs_of, model_of


def needs_onnx() -> None:
    for name in FORMATS["onnx"].needed:
        pytest.importorskip(name, reason="the ONNX tests need shearling[export]")


@pytest.fixture(scope="module")
def pruned(pruned: Path) -> Path:
    """A copy beside the dense model: an export is noted in the model's record."""
    return shutil.copytree(pruned, pruned.parent / "to-export")


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


def test_attention_is_written_without_detours(pruned: Path, tmp_path: Path) -> None:
    needs_onnx()
    import onnx

    model = load_model(str(pruned), device="cpu")
    before = model.config._attn_implementation
    inputs = inputs_of(batches_of(1, 2, 8)[0])
    FORMATS["onnx"].write(Job(model, inputs, ["logits"], tmp_path / "model.onnx"))
    nodes = [node.op_type for node in onnx.load(str(tmp_path / "model.onnx")).graph.node]
    assert not {"IsNaN", "Slice"} & set(nodes[nodes.index("Softmax") :])
    assert before == model.config._attn_implementation == "sdpa"


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


def test_the_record_and_the_card_name_the_file(pruned: Path, onnx_file: tuple[Path, dict[str, Any]]) -> None:
    entry = json.loads((pruned / "shearling.json").read_text())["exports"][0]
    assert (entry["out"], entry["format"], entry["precision"]) == ("model.onnx", "onnx", "float32")
    assert entry["bytes"] == onnx_file[0].stat().st_size
    assert "Exported as `model.onnx` (onnx, float32" in (pruned / "README.md").read_text()
    shearling.load(pruned)  # the record is still a valid one


@pytest.mark.parametrize("way", ["dynamic", "static"])
def test_quantisation_shrinks_the_file_and_stays_close(
    pruned: Path, onnx_file: tuple[Path, dict[str, Any]], tmp_path: Path, way: str
) -> None:
    from shearling.exporters.onnx import open_runner, quantise_dynamic, quantise_static

    if way == "dynamic":
        quantise_dynamic(onnx_file[0], tmp_path / "int8.onnx")
    else:
        calibration = inputs_from_tokenizer(load_model(str(pruned), device="cpu"), load_tokenizer(str(pruned)))
        quantise_static(onnx_file[0], tmp_path / "int8.onnx", calibration)
    assert (tmp_path / "int8.onnx").stat().st_size < onnx_file[0].stat().st_size
    model = load_model(str(pruned), device="cpu")
    batches = inputs_from_tokenizer(model, load_tokenizer(str(pruned)))
    found = check(open_runner(tmp_path / "int8.onnx"), batches, reference(model, batches), precision=f"int8-{way}")
    assert 0 < found.mean < TOLERANCE[f"int8-{way}"]


@pytest.mark.slow  # one more capture and ONNX file
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
    assert result.format == "torch"  # "exported" is its name of the first edition
    assert result.dense is None
    assert result.difference.largest < 1e-4
    program = torch.export.load(out).module()
    inputs = inputs_of(batches_of(1, 3, 9)[0]) | {"token_type_ids": torch.zeros(3, 9).long()}
    model = load_model(str(pruned), device="cpu")
    with torch.no_grad():
        torch.testing.assert_close(program(**inputs)["logits"], model(**inputs).logits)


def test_a_failed_check_leaves_nothing(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = FORMATS["torch"]
    monkeypatch.setattr(kind, "write", lambda job: job.path.write_bytes(b"wrong"))
    monkeypatch.setattr(kind, "open_runner", lambda path: lambda i: {"logits": np.ones((len(i["input_ids"]), 2))})
    with pytest.raises(CheckFailed, match="Nothing was written"):
        export_model(str(dense), tmp_path / "model.pt2", format="exported")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_torch_traces_is_not_lost(dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python drops what is raised in the callback of a weak reference, and torch has many of these."""

    class Node:
        pass

    def write(job: Job) -> None:
        node = Node()
        watched = weakref.ref(node, lambda _: signal.raise_signal(signal.SIGINT))
        del node
        assert watched() is None
        job.path.write_bytes(b"whole")

    monkeypatch.setattr(FORMATS["torch"], "write", write)
    monkeypatch.setattr(FORMATS["torch"], "open_runner", lambda path: pytest.fail if path.is_file() else None)
    assert command(["export", str(dense), "--format", "torch", "--out", str(tmp_path / "model.pt2")]) == 130
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


def test_a_directory_for_servers(
    pruned: Path, onnx_file: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FORMATS["onnx"], "write", lambda job: shutil.copy(onnx_file[0], job.path))  # of the same model
    alone = shutil.copytree(pruned, tmp_path / "away" / "from" / "dense")
    result = export_model(str(alone), tmp_path / "served", rounds=1)
    folder = tmp_path / "served"
    assert result.out == folder
    assert FORMATS["onnx"].open_runner(folder / "onnx" / "model.onnx")
    assert (folder / "tokenizer.json").is_file()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert not config.keys() & {"auto_map", "quantization_config"}  # there are no weights for a loader to reshape
    with pytest.raises(OutputError, match="exists"):
        export_model(str(alone), folder)


@pytest.mark.slow  # test_public_export.py scores a file too
def test_the_scores_of_each_step(pruned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = rows_file(tmp_path / "rows.jsonl"), tmp_path / "model.pt2"
    line = ["export", str(pruned), "--format", "torch", "--out", str(out), "--eval", str(rows), "--json", "--quiet"]
    assert command(line) == 0
    said = json.loads(capsys.readouterr().out)["evaluation"]
    assert said["metric"] == "accuracy"
    assert said["exported"] == said["pruned"] == said["model"]  # the file gives the same predictions
    model = load_model(str(pruned), device="cpu")
    assert said["pruned"] == pytest.approx(_accuracy(model, str(pruned), rows))
    assert 0 <= said["dense"] <= 100


def _accuracy(model: Any, name: str, path: Path) -> float:
    """By hand, one row at a time."""
    tokenizer = load_tokenizer(name)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    with torch.no_grad():
        right = [int(model(**tokenizer(r["text"], return_tensors="pt")).logits.argmax()) == r["label"] for r in rows]
    return 100 * sum(right) / len(right)


def test_the_list_of_formats(pruned: Path, dense: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["export", str(pruned), "--format", "list", "--json", "--quiet"]) == 0
    said = {row["format"]: row for row in json.loads(capsys.readouterr().out)["formats"]}
    assert said["onnx"]["suits"]
    assert "layers differ in size" in said["ctranslate2"]["reason"]
    assert "it is a bert" in said["gguf"]["reason"]
    assert command(["export", str(dense), "--format", "list", "--json", "--quiet"]) == 0
    said = {row["format"]: row for row in json.loads(capsys.readouterr().out)["formats"]}
    assert said["ctranslate2"]["suits"]  # all layers alike
    with pytest.raises(ModelError, match="Formats that suit it: onnx, torch, openvino"):
        check_suits(FORMATS["gguf"], load_model(str(dense), device="cpu"))


@pytest.mark.parametrize("precision", ["float32", "int8-static"])
def test_openvino(dense: Path, tmp_path: Path, precision: str) -> None:
    needs_onnx()
    pytest.importorskip("openvino", reason="needs shearling[openvino]")
    result = export_model(str(dense), tmp_path / "model.xml", format="openvino", precision=precision, rounds=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.bin", "model.xml"]
    assert result.difference.mean < {"float32": 1e-5, "int8-static": 0.1}[precision]
    assert result.this.bytes == sum(p.stat().st_size for p in tmp_path.iterdir())


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_ctranslate2(dense: Path, tmp_path: Path, precision: str) -> None:
    pytest.importorskip("ctranslate2", reason="needs shearling[ctranslate2]")
    result = export_model(str(dense), tmp_path / "encoder", format="ctranslate2", precision=precision, rounds=1)
    assert (tmp_path / "encoder" / "model.bin").is_file()
    assert result.outputs[0] == "last_hidden_state"
    assert result.difference.mean < (1e-5 if precision == "float32" else 0.1)


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
