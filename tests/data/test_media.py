"""Images and sound: read, processed by the model's own processor, and pruned from a folder as from batches."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from data.tiny import evaluate
from families import WHISPER, tiny_model
from shearling.checkpoint.pretrained import load_model
from shearling.cli import run
from shearling.data import as_rows, encode, infer_task, read_rows
from shearling.errors import DataError
from shearling.exporters.table import FORMATS
from shearling.workflows.compare import compare
from shearling.workflows.export import Wanted

PIL = pytest.importorskip("PIL.Image")
RATE = 16000


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(36):
            pixels = rng.integers(0, 255, (20, 24, 3), dtype=np.uint8)
            PIL.fromarray(pixels).save(tmp_path / "pictures" / name / f"{number:02}.png")
    return tmp_path / "pictures"


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "sounds").mkdir()
    for number in range(6):
        with wave.open(str(tmp_path / "sounds" / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes((rng.normal(0, 3000, 60 + 10 * number)).astype(np.int16).tobytes())
    return tmp_path / "sounds"


def vit_directory(folder: Path) -> tuple[Any, Any]:
    model = tiny_model("vit")
    model.config.label2id, model.config.id2label = {"cat": 0, "dog": 1}, {0: "cat", 1: "dog"}
    model.save_pretrained(folder)
    size = {"height": 16, "width": 16}
    processor = transformers.AutoImageProcessor.from_pretrained
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "ViTImageProcessor", "size": size, "do_resize": True})
    )
    return model, processor(folder)


def test_a_folder_of_images_gives_its_classes(pictures: Path, tmp_path: Path) -> None:
    model, processor = vit_directory(tmp_path / "vit")
    rows = read_rows(pictures)
    assert rows.names == ("image", "label")
    batches = encode(rows, processor, "classification", model_config=model.config, batch_size=16, samples=70)
    assert sum(len(b["labels"]) for b in batches) == 70
    assert batches[0]["pixel_values"].shape == (16, 3, 16, 16)
    with PIL.open(rows.column("image")[0]) as image:
        alone = processor(images=image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
    whole = encode(rows, processor, "classification", model_config=model.config, batch_size=16)
    torch.testing.assert_close(whole[0]["pixel_values"][0], torch.as_tensor(alone))
    assert {int(v) for b in batches for v in b["labels"]} == {0, 1}


def test_a_column_of_images(pictures: Path, tmp_path: Path) -> None:
    model, processor = vit_directory(tmp_path / "vit")
    paths = sorted(pictures.rglob("*.png"))[:4]
    opened = [PIL.open(p).convert("RGB") for p in paths]
    forms = [
        [str(p) for p in paths],
        opened,
        [{"bytes": p.read_bytes(), "path": None} for p in paths],
        [np.asarray(image) for image in opened],
    ]
    made = []
    for images in forms:
        rows = as_rows([{"image": image, "label": "cat"} for image in images])
        made.append(encode(rows, processor, "classification", model_config=model.config, batch_size=4)[0])
    for batch in made[1:]:
        torch.testing.assert_close(batch, made[0])


def test_prune_and_evaluate_from_a_folder_of_images(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, processor = vit_directory(tmp_path / "vit")
    command = [
        "prune",
        str(tmp_path / "vit"),
        "--data",
        str(pictures),
        "--flops",
        "0.5",
        "--out",
        str(tmp_path / "half"),
    ]
    assert run([*command, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["flops"]["ratio"] <= 0.5
    assert (tmp_path / "half" / "preprocessor_config.json").is_file()
    assert run(["evaluate", str(tmp_path / "half"), "--data", str(pictures), "--json", "--quiet"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["metric"] == "accuracy"
    assert record["examples"] == 72
    result = evaluate(model, processor, pictures)
    assert 0 <= result.value <= 100


def test_compare_retrain_and_export_from_a_folder_of_images(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vit_directory(tmp_path / "vit")
    dense, half, data = str(tmp_path / "vit"), str(tmp_path / "half"), ["--data", str(pictures)]
    assert run(["prune", dense, *data, "--flops", "0.5", "--out", half, "--device", "cpu", "--quiet"]) == 0
    capsys.readouterr()
    assert run(["compare", dense, half, *data, "--device", "cpu", "--json", "--quiet"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["agreement"]["count"] == 72
    assert 0 < said["models"][1]["macs"] < said["models"][0]["macs"]
    assert said["batch"] == said["models"][0]["batch"] == [32, 3, 16, 16]
    out = str(tmp_path / "retrained")
    more = ["--eval", str(pictures), "--teacher", dense, "--epochs", "1", "--device", "cpu", "--json", "--quiet"]
    assert run(["retrain", half, *data, "--out", out, *more]) == 0
    assert json.loads(capsys.readouterr().out)["retrained"]["after"]["examples"] == 72
    wanted = Wanted(half, FORMATS["onnx"], "float32", str(pictures))
    wanted.read(load_model(half, device="cpu"))
    batches = wanted.batches
    assert [tuple(batch["pixel_values"].shape[1:]) for batch in batches] == [(3, 16, 16)] * len(batches)
    assert list(batches[0]) == ["pixel_values"]


def test_a_model_that_writes_what_it_hears(sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whisper is pruned from a folder of sounds; its decoder may have few positions. Scores are refused in words."""
    config = transformers.WhisperConfig(**WHISPER | {"max_source_positions": 50, "max_target_positions": 12})
    model = transformers.WhisperForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "model")
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    extractor.save_pretrained(tmp_path / "model")
    named = [str(tmp_path / "model"), "--data", str(sounds)]
    assert run(["prune", *named, "--flops", "0.6", "--out", str(tmp_path / "half"), "-q"]) == 0
    record = json.loads((tmp_path / "half" / "shearling.json").read_text())
    assert any("generated them" in note for note in record["warnings"])
    assert run(["evaluate", *named]) == 2
    assert "cannot be scored here" in capsys.readouterr().err


def test_other_heads_are_pruned_from_a_folder_but_not_scored(
    sounds: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that spells what it hears (CTC) needs no task to be pruned and compared."""
    tiny_model("wav2vec2-stable").save_pretrained(tmp_path / "model")
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=True)
    extractor.save_pretrained(tmp_path / "model")
    named, half = [str(tmp_path / "model"), "--data", str(sounds)], str(tmp_path / "half")
    assert run(["prune", *named, "--flops", "0.6", "--out", half, "-q"]) == 0
    assert run(["compare", str(tmp_path / "model"), half, "--data", str(sounds), "--json", "-q"]) == 0
    assert json.loads(capsys.readouterr().out)["agreement"]["count"] > 6  # predictions of tokens, of 6 clips
    assert run(["prune", *named, "--flops", "0.6", "--eval", str(sounds), "--dry-run", "-q"]) == 2
    assert "Wav2Vec2ForCTC gives neither classes nor embeddings" in capsys.readouterr().err


def test_a_bare_model_of_sound_is_judged_by_its_neighbours(sounds: Path, tmp_path: Path) -> None:
    model = transformers.AutoModel.from_config(tiny_model("hubert").config)
    assert infer_task(model).name == "knn"
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=True)
    rows = as_rows([{"audio": path, "label": n % 2} for n, path in enumerate(read_rows(sounds).column("audio"))])
    assert evaluate(model, extractor, rows).metric == "accuracy"


def test_compare_models_of_sound(sounds: Path, tmp_path: Path) -> None:
    tiny_model("wav2vec2").save_pretrained(tmp_path / "model")
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE, return_attention_mask=True)
    extractor.save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model")
    result = compare(model, model, sounds, task="classification", batch_size=3, device="cpu", progress=False)
    assert result.agreement is not None
    assert (result.agreement.value, result.agreement.count) == (100, 6)
    assert result.sides[0].macs == result.sides[1].macs > 0


def test_sounds_are_padded_and_masked(sounds: Path) -> None:
    extractor = transformers.Wav2Vec2FeatureExtractor(
        sampling_rate=RATE, return_attention_mask=True, do_normalize=False
    )
    model = tiny_model("wav2vec2")
    batches = encode(
        read_rows(sounds), extractor, "classification", model_config=model.config, batch_size=3, labels="optional"
    )
    assert [b["input_values"].shape for b in batches] == [(3, 110), (3, 80)]
    assert batches[1]["attention_mask"].sum(1).tolist() == [80, 70, 60]
    assert batches.order.tolist() == [5, 4, 3, 2, 1, 0]
    with torch.no_grad():
        assert model(**batches[0]).logits.shape == (3, 2)


def test_what_cannot_be_read_is_named(sounds: Path, pictures: Path, tmp_path: Path) -> None:
    extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=8000)
    config = tiny_model("wav2vec2").config
    with pytest.raises(DataError, match="16000 samples a second, the model takes 8000"):
        encode(read_rows(sounds), extractor, "classification", model_config=config, labels="optional")
    with pytest.raises(DataError, match=r"the model takes audio data, but .* has the columns \['image', 'label'\]"):
        encode(read_rows(pictures), extractor, "classification", model_config=config, labels="optional")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is a directory"):
        read_rows(tmp_path / "empty")
    (tmp_path / "empty" / "broken.png").write_bytes(b"no image")
    model, processor = vit_directory(tmp_path / "vit")
    with pytest.raises(DataError, match=r"row 1 of .* is not an image"):
        encode(read_rows(tmp_path / "empty"), processor, "classification", model_config=model.config, labels="optional")


def test_compare_bare_models_of_images(pictures: Path, tmp_path: Path) -> None:
    _, processor = vit_directory(tmp_path / "vit")
    transformers.ViTModel(tiny_model("vit").config).save_pretrained(tmp_path / "bare")
    processor.save_pretrained(tmp_path / "bare")
    bare = str(tmp_path / "bare")
    result = compare(bare, bare, pictures, batch_size=32, device="cpu", progress=False)
    assert result.agreement is not None
    assert (result.agreement.measure, round(result.agreement.value, 3)) == ("cosine", 100)
