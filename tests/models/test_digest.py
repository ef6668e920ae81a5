from __future__ import annotations

import copy

import torch

from shearling.models.digest import VALUES, weights_digest_of
from tiny import model_of


def test_the_same_weights_have_the_same_digest() -> None:
    model = model_of("bert")
    digest = weights_digest_of(model)
    assert digest == weights_digest_of(copy.deepcopy(model).train()) == weights_digest_of(model_of("bert"))
    assert digest == weights_digest_of(copy.deepcopy(model).double())  # nothing was rounded


def test_other_weights_have_another_digest() -> None:
    model = model_of("bert")
    digest = weights_digest_of(model)
    assert digest != weights_digest_of(model_of("bert", seed=1))
    assert digest != weights_digest_of(copy.deepcopy(model).bfloat16())
    with torch.no_grad():
        for name in ("classifier.bias", "bert.encoder.layer.1.output.dense.weight"):
            changed = copy.deepcopy(model)
            changed.get_parameter(name).mul_(1.001)
            assert digest != weights_digest_of(changed), name


def test_values_come_from_all_over_a_parameter() -> None:
    layer = torch.nn.Linear(300, 200, bias=False)
    digest = weights_digest_of(layer)
    for place in (0, -1):
        changed = copy.deepcopy(layer)
        with torch.no_grad():
            changed.weight.view(-1)[place] += 1
        assert digest != weights_digest_of(changed)
    assert layer.weight.numel() > VALUES
