"""Images without a processor file, and bare vision models judged by their nearest neighbours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from families import tiny_model
from shearling.cli import run
from shearling.data.images import ImageOptions, PlainImages, plain_images
from shearling.errors import DataError, InputError
from shearling.evaluation.scores import _NEIGHBOURS, _TEMPERATURE, neighbours

PIL = pytest.importorskip("PIL.Image")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes that differ in their colour."""
    rng = np.random.default_rng(0)
    for name, colour in (("red", (200, 30, 30)), ("blue", (30, 30, 200))):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.clip(np.array(colour) + rng.integers(-30, 30, (20, 24, 3)), 0, 255).astype(np.uint8)
            PIL.fromarray(pixels).save(tmp_path / "pictures" / name / f"{number:02}.png")
    return tmp_path / "pictures"


def test_plain_images_are_resized_scaled_and_normalised() -> None:
    grey = PIL.new("RGB", (30, 10), (51, 102, 255))
    made = PlainImages(4, 6, (0.1, 0.2, 0.5), (0.5, 0.25, 1.0))(images=[grey, grey])["pixel_values"]
    assert made.shape == (2, 3, 4, 6)
    for channel, value in enumerate(((0.2 - 0.1) / 0.5, (0.4 - 0.2) / 0.25, 0.5)):
        torch.testing.assert_close(made[:, channel], torch.full((2, 4, 6), value))


def test_options_fill_what_the_configuration_leaves_open(caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_model("vit").config
    assert plain_images(config, ImageOptions(mean=[0.5], std=[0.5])) == PlainImages(16, 16, (0.5,) * 3, (0.5,) * 3)
    assert not caplog.records
    assert plain_images(config, ImageOptions(size=8)).height == 8
    assert "--mean 0.5 --std 0.5" in caplog.text
    with pytest.raises(InputError, match="one number or three"):
        plain_images(config, ImageOptions(mean=[1.0, 2.0]))
    with pytest.raises(InputError, match="deviations are above 0"):
        plain_images(config, ImageOptions(std=[0.0]))


@pytest.mark.parametrize("own", [True, False], ids=["own index", "another index"])
def test_neighbours_vote_as_by_brute_force(own: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, other = (torch.randn(50, 6, generator=generator) for _ in range(2))
    classes = torch.randint(0, 3, (50,), generator=generator)
    bank = queries if own else other
    expected = []
    for i, query in enumerate(queries):
        near = [(float(torch.cosine_similarity(query, bank[j], dim=0)), int(classes[j])) for j in range(50) if j != i]
        votes = [0.0, 0.0, 0.0]
        for similarity, name in sorted(near, reverse=True)[:_NEIGHBOURS]:
            votes[name] += float(np.exp(similarity / _TEMPERATURE))
        expected.append(int(np.argmax(votes)))
    assert neighbours(queries, None if own else other, classes, 3).tolist() == expected
    with pytest.raises(DataError, match="6 dimensions, the index in 4"):
        neighbours(queries, torch.randn(50, 4), classes, 3)


@pytest.mark.parametrize("family", ["dinov2", "vit"])
def test_a_bare_model_without_a_processor_is_pruned_and_judged_by_its_neighbours(
    family: str, pictures: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny_model(family).base_model.save_pretrained(tmp_path / "dense")
    images = [
        "--data",
        str(pictures),
        "--image-size",
        "16",
        "--mean",
        "0.5",
        "--std",
        "0.5,0.5,0.5",
        "--pooling",
        "cls",
    ]

    def call(*words: Any) -> dict[str, Any]:
        capfd.readouterr()
        assert run([*map(str, words), *images, "--json", "--quiet"]) == 0, capfd.readouterr().err
        found: dict[str, Any] = json.loads(capfd.readouterr().out)
        return found

    half = tmp_path / "half"
    pruned = call("prune", tmp_path / "dense", "--flops", "0.6", "--eval", pictures, "--no-timing", "-o", half)
    assert pruned["evaluation"]["task"] == "knn"
    assert pruned["evaluation"]["dense"] == 100, "colours are far apart in any embedding"
    own, dense = call("evaluate", half), call("evaluate", half, "--index", "dense")
    assert own["value"] == pruned["evaluation"]["pruned"]
    assert own["examples"] == dense["examples"] == 40
    assert 50 < dense["value"] <= 100
    both = call("compare", tmp_path / "dense", half)
    assert both["agreement"]["measure"] == "cosine"


def test_classes_of_one_image_each_cannot_be_judged(pictures: Path, tmp_path: Path, capfd: Any) -> None:
    tiny_model("vit").base_model.save_pretrained(tmp_path / "dense")
    for path in pictures.rglob("*.png"):
        if path.name != "00.png":
            path.unlink()
    assert run(["evaluate", str(tmp_path / "dense"), "--data", str(pictures)]) == 2
    assert "needs several of a class" in capfd.readouterr().err
    assert run(["evaluate", str(tmp_path / "dense"), "--data", str(pictures), "--mean", "half"]) == 2


def test_sizes_and_columns_that_do_not_suit_are_told(pictures: Path, tmp_path: Path, capfd: Any) -> None:
    tiny_model("vit").base_model.save_pretrained(tmp_path / "bare")
    named = ["prune", str(tmp_path / "bare"), "--data", str(pictures), "--flops", "0.5", "--dry-run", "-q"]
    assert run([*named, "--image-size", "15"]) == 2
    assert "ViTModel does not take these examples: Input image size (15*15)" in capfd.readouterr().err
    assert run([*named, "--image-size", "15", "--eval", str(pictures)]) == 2
    assert "does not take these examples" in capfd.readouterr().err
    assert run([*named, "--text-columns", "picture"]) == 2
    assert "no column 'picture'" in capfd.readouterr().err


def test_a_classifier_on_a_tower_has_its_size_there() -> None:
    assert plain_images(tiny_model("clip").config, ImageOptions()).height == 16
