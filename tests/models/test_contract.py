"""What every row of the architecture table must do, on a tiny random model of each family and variant."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

import shearling
from families import (
    DECODERS,
    EVERY,
    FAMILIES,
    MAIN,
    RELATIVES,
    outputs_of,
    relatives_slow,
    slow,
    tiny_batches,
    tiny_model,
)
from shearling.checkpoint.pruned import _auto_map
from shearling.costs import count_macs, count_params, parameters, sequence_lengths
from shearling.engine.hooks import frozen, masked
from shearling.engine.layerwise import HiddenStates, LayerwiseRun, run_layer, start_run
from shearling.engine.repair import target
from shearling.models.shrink import shrink
from shearling.models.structure import check_supported, structure_of
from shearling.models.table import ROWS
from shearling.paper.fisher import mask_gradients
from shearling.sample.read import sample_of
from shearling.surgeon.measure import measure
from tiny import as_run
from warm import python

every_family = pytest.mark.parametrize("family", relatives_slow(FAMILIES))
ALL = tuple(range(16))
PICKING = ("mpnet", "beit", "beit-shared", "t5", "flan-t5", "mt5")
KINDS = ("bert", "mpnet", "albert", "swin", "clip", "whisper", "t5", "llama")  # one of each kind of structure
ATTENTION = [(name, kind) for name, f in FAMILIES.items() for kind in (("eager", "sdpa") if f.sdpa else ("eager",))]


def one_of_each(families: Sequence[str]) -> list[Any]:
    """The families as cases of a test: one of each kind, the others with the slow checks."""
    return [name if name in KINDS else slow(name) for name in families]


def some_kept(structure: Any, seed: int = 0, empty: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """A random choice of units that stay; none in the sublayers named as empty, or as many as must stay."""
    generator = torch.Generator().manual_seed(seed)
    kept = []
    for number, sublayer in enumerate(structure.sublayers):
        count = int(torch.randint(1, max(sublayer.units, 2), (1,), generator=generator))
        count = sublayer.floor if number in empty else max(count, sublayer.floor)
        kept.append(torch.randperm(sublayer.units, generator=generator)[:count].sort().values)
    return kept


def masks_of(structure: Any, kept: list[torch.Tensor]) -> list[torch.Tensor]:
    masks = [torch.zeros(s.units) for s in structure.sublayers]
    for mask, units in zip(masks, kept, strict=True):
        mask[units] = 1
    return masks


def same(left: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-4) -> bool:
    """Equal up to a share of the largest value."""
    return float((left - right).abs().max()) <= tolerance * max(1.0, float(right.abs().max()))


def test_every_row_is_under_contract() -> None:
    assert {name for row in ROWS for name in row.model_types} == EVERY


@every_family
def test_unit_counts(family: str) -> None:
    """Counted from the configuration alone, by the names each family uses for its sizes."""
    config = FAMILIES[family].config
    if FAMILIES[family].model_type == "swin":  # stages differ: twice as wide, and twice as many heads
        sizes = structure_of(tiny_model(family)).sizes
        assert sizes == [{"heads": 2, "filters": 32}] * 2 + [{"heads": 4, "filters": 64}]
        return
    towers = [config["text_config"], config["vision_config"]] if "text_config" in config else [config]
    inside = check_supported(tiny_model(family).config).inside
    towers = towers[:1] if inside else towers  # the vision tower stays as it is
    sided = {"encoder_layers", "d_kv", "encoder_num_hidden_layers"}
    layers, heads, filters = [], [], []
    for tower in towers:
        for side in ("encoder_", "decoder_") if sided & tower.keys() else ("",):
            if side == "decoder_" and ("encoder" in family or family == "mt5"):
                continue
            names = {"heads": ("num_kv_heads", "num_key_value_heads", f"{side}attention_heads",
                               f"{side}num_attention_heads", "num_attention_heads", "n_heads", "num_heads", "n_head"),
                     "filters": (f"{side}ffn_dim", "ffn_dim", "intermediate_size", "hidden_dim", "n_inner", "d_ff"),
                     "layers": (f"{side}layers", f"{side}num_hidden_layers", "num_hidden_layers",
                                 "n_layers", "n_layer", "num_layers")}  # fmt: skip
            found = {kind: next(tower[n] for n in options if n in tower) for kind, options in names.items()}
            depth = 1 if family == "albert" else found["layers"]
            width = (
                64 if family in ("dinov2", "dinov2_with_registers") else found["filters"]
            )  # mlp_ratio 2; gated: two thirds of it, to 48
            layers += [depth]
            heads += [FAMILIES[family].heads or found["heads"]] * depth
            filters += [FAMILIES[family].filters or width] * depth
    structure = structure_of(tiny_model(family))
    assert [len(stack.layers) for stack in structure.stacks] == layers
    wanted = [{"heads": h, "filters": f} for h, f in zip(heads, filters, strict=True)]
    if sided & config.keys() and len(layers) == 2:  # the decoder's layers attend across, with as many heads
        wanted[layers[0] :] = [{"heads": h["heads"], "cross_heads": h["heads"], **h} for h in wanted[layers[0] :]]
    assert structure.sizes == wanted


@pytest.mark.parametrize(("family", "attention"), ATTENTION)
@pytest.mark.parametrize("empty", [(), ALL], ids=["some", "nothing-left"])
def test_masked_equals_shrunk(family: str, attention: str, empty: tuple[int, ...]) -> None:
    model, batch = tiny_model(family, attention=attention), tiny_batches(family, 1)[0]
    structure = structure_of(model)
    kept = some_kept(structure, empty=empty)
    with masked(structure.sublayers, masks_of(structure, kept)):
        expected = outputs_of(model, batch)
    small = shrink(model, kept)
    assert not same(outputs_of(model, batch), expected, 1e-3), "the units that were removed do not matter at all"
    assert same(outputs_of(small, batch), expected)
    assert [s.units for s in structure_of(small).sublayers] == [len(units) for units in kept]
    assert small.config._attn_implementation == attention


@every_family
def test_shrink_keeps_dtype_grad_and_mode(family: str) -> None:
    model, batch = tiny_model(family).to(torch.bfloat16), tiny_batches(family, 1)[0]
    batch = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in batch.items()}
    model.base_model.requires_grad_(False)
    structure = structure_of(model)
    kept = some_kept(structure)
    with masked(structure.sublayers, masks_of(structure, kept)):
        expected = outputs_of(model, batch)
    small = shrink(model, kept)
    assert {p.dtype for p in small.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in small.base_model.parameters())
    assert small.training == model.training
    assert same(outputs_of(small, batch), expected, 0.15)


@every_family
def test_costs_by_formula_equal_costs_by_running(family: str) -> None:
    """What pruning takes off the formula is what it takes off the count of a real forward pass, and of parameters."""
    model, batches = tiny_model(family, attention="eager"), tiny_batches(family, 1, 1, padded=False)
    sample = sample_of(batches)
    structure = structure_of(model)
    lengths = sequence_lengths(structure, sample)
    small = shrink(model, some_kept(structure, empty=(1, 2)))
    after = structure_of(small)

    def run(candidate: Any) -> int:
        with frozen(candidate), FlopCounterMode(display=False) as counter:
            outputs_of(candidate, batches[0])
        return int(counter.get_total_flops()) // 2

    formula = count_macs(structure, lengths) - count_macs(after, lengths)
    assert formula > 0
    assert run(model) - run(small) == formula
    assert parameters(model) - parameters(small) == count_params(structure) - count_params(after)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in RELATIVES])
def test_statistics_are_finite_and_count_real_tokens(family: str) -> None:
    structure, sample = structure_of(tiny_model(family)), sample_of(tiny_batches(family))
    for sublayer, gradients in zip(
        structure.sublayers, mask_gradients(structure, as_run(tiny_batches(family)), labels=False), strict=True
    ):
        assert gradients.shape == (sample.examples, sublayer.units)
        assert gradients.isfinite().all(), sublayer.name
        assert gradients.abs().sum() > 0, sublayer.name
    for sublayer, curvature in zip(structure.sublayers, measure(structure, as_run(tiny_batches(family))), strict=True):
        for factor in (curvature.A.matrix, curvature.G.matrix):
            assert factor.isfinite().all(), sublayer.name
            assert factor.abs().sum() > 0, sublayer.name


@every_family
def test_what_repairs_aim_at_is_the_teacher(family: str) -> None:
    """Were a sublayer of a student with damaged inputs to put out its target, its layer would be the teacher's."""
    model, batch = tiny_model(family), as_run(tiny_batches(family, 1))[0]
    structure = structure_of(model)
    with frozen(model), torch.no_grad():
        for stack in structure.stacks:
            teacher = start_run(model, stack, [batch], "float32")
            for depth in range(len(stack.layers)):
                damaged = teacher.hidden[0] + 0.1 * torch.randn_like(teacher.hidden[0])
                for part, sublayer in enumerate(stack.sublayers[depth]):
                    student = LayerwiseRun(HiddenStates([damaged]), teacher.calls, "float32")
                    above, below = (run_layer(stack, depth, part, lane, 0, "end") for lane in (teacher, student))
                    assert not same(below.hidden, above.hidden, 1e-3)
                    assert same(sublayer.weight @ above.h.mT, above.o.mT - _column(sublayer.bias), 1e-4)
                    y = target(sublayer, above, below)
                    handle = sublayer.out.register_forward_hook(lambda module, args, out, y=y: y.view_as(out))
                    repaired, after = _run(stack, depth, part, student)
                    handle.remove()
                    wanted = _run(stack, depth, part, teacher)[1]
                    if sublayer.follows == "output":  # it adds what the teacher's does, to a residual of its own
                        after, wanted = after - below.x, wanted - above.x
                    # MobileBERT adds what entered the layer to its end too: that damage is not the last FFN's.
                    if family != "mobilebert" or part < len(stack.sublayers[depth]) - 1:
                        assert same(after, wanted, 1e-4), sublayer.name
                    whole = family != "mobilebert" and not _has_one_beside(stack.sublayers[depth], part)
                    if sublayer.follows == "residual" and whole:
                        assert same(repaired, above.hidden, 1e-4), sublayer.name
                teacher.hidden[0] = above.hidden


def _run(stack: Any, depth: int, part: int, lane: LayerwiseRun) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer puts out, and the residual stream behind one of its sublayers."""
    hidden = run_layer(stack, depth, part, lane, 0, "end").hidden
    last = part == len(stack.sublayers[depth]) - 1
    after = hidden if last else run_layer(stack, depth, part + 1, lane, 0, "out").x
    assert hidden is not None
    assert after is not None
    return hidden, after


def _has_one_beside(sublayers: Any, part: int) -> bool:
    """Whether the next sublayer reads the residual from before this one: it then still sees the damage."""
    return part + 1 < len(sublayers) and bool(sublayers[part + 1].part.beside)


def _column(bias: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(1, 1) if bias is None else bias[:, None]


def pruned_by(family: str, method: str) -> shearling.Pruned:
    """A family's model, pruned to half; its own weights stay as they are."""
    model = tiny_model(family)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    pruned = shearling.prune(model, tiny_batches(family), flops=0.5, method=method)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert pruned.report.flops.ratio <= 0.5
    assert (pruned.report.check or 0) < 1e-3
    return pruned


@pytest.mark.parametrize("family", one_of_each([name for name in FAMILIES if name not in RELATIVES]))
def test_prune_by_the_paper(family: str) -> None:
    pruned_by(family, "paper")


@pytest.mark.parametrize("family", [name if name in MAIN else slow(name) for name in FAMILIES])
def test_prune_save_load(family: str, tmp_path: Path) -> None:
    pruned = pruned_by(family, "surgeon")
    pruned.save(tmp_path / "small")
    batch = tiny_batches(family, 1, seed=1)[0]
    expected = outputs_of(pruned.model, batch)
    assert same(outputs_of(shearling.load(tmp_path / "small"), batch), expected, 1e-5)
    again = getattr(transformers, FAMILIES[family].cls).from_pretrained(tmp_path / "small")
    assert same(outputs_of(again, batch), expected, 1e-5)


NO_AUTO_CLASS = {"siglip_text_model", "siglip2_text_model"}  # transformers loads them by their own classes alone
REMOTE = """
import sys
assert "shearling" not in sys.modules
sys.modules["shearling"] = None  # it cannot be imported
import json, torch, transformers
transformers.logging.set_verbosity_error()
lines = [json.loads(line) for line in open(sys.argv[1])]
for folder, auto in lines[:1]:  # before the file in any checkpoint has made itself known
    try:
        getattr(transformers, auto).from_pretrained(folder)
    except Exception as error:
        open(sys.argv[1] + ".refused", "w").write(str(error))
for folder, auto in lines:
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        outputs = model(**torch.load(folder + "/inputs.pt"), return_dict=True)
    torch.save({k: v for k, v in outputs.items() if isinstance(v, torch.Tensor)}, folder + "/outputs.pt")
"""


def _auto_class(model: Any) -> str:
    """The `AutoModel...` that gives this class, or the one that gives its base."""
    for name in model.config.auto_map:
        found = _class_of(name, model)
        if type(model) in (found if isinstance(found, tuple) else (found,)):
            return str(name)
    return "AutoModel"


def _class_of(auto: str, model: Any) -> Any:
    """The class, or classes, that an `AutoModel...` gives for the model's configuration."""
    return getattr(transformers, auto)._model_mapping[type(model.config)]


@pytest.mark.slow
def test_every_family_loads_without_shearling(tmp_path: Path) -> None:
    """One process that cannot import shearling loads them all, with `trust_remote_code`, to the same outputs.

    Without `trust_remote_code` it fails loudly, never with random layers.
    """
    expected = {}
    lines = []
    for family in sorted({*FAMILIES} - NO_AUTO_CLASS):
        model, folder = tiny_model(family), tmp_path / family
        structure = structure_of(model)
        small = shrink(model, some_kept(structure, empty=(2,)))
        small.config.auto_map = _auto_map(small)
        small.save_pretrained(folder)
        batch = tiny_batches(family, 1)[0]
        torch.save(batch, folder / "inputs.pt")
        auto = _auto_class(small)
        with torch.no_grad():
            runs = small if isinstance(small, _class_of(auto, small)) else small.base_model
            expected[family] = runs(**batch, return_dict=True)
        lines.append(json.dumps([str(folder), auto]))
    (tmp_path / "list").write_text("\n".join(lines))
    done = python(REMOTE, str(tmp_path / "list"))
    assert done.returncode == 0, done.stderr
    refused = (tmp_path / "list.refused").read_text()
    assert "Run `import shearling` before loading it, or pass trust_remote_code=True" in refused
    for family, outputs in expected.items():
        loaded = torch.load(tmp_path / family / "outputs.pt")
        # `AutoModel` may give a class with another head (CLIP's text tower, before 5.22); the hidden states remain.
        shared = [name for name in loaded if name in outputs]
        assert "last_hidden_state" in shared or len(shared) == len(loaded) > 0, family
        for name in shared:
            assert same(loaded[name], outputs[name], 1e-5), f"{family}: {name}"


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("beams", [1, 2])
def test_generation_with_and_without_cache(family: str, beams: int) -> None:
    """Also where a layer has no attention left, and so nothing in the cache."""
    model = tiny_model(family)
    structure = structure_of(model)
    small = shrink(model, some_kept(structure, empty=ALL))
    inputs = {k: v for k, v in tiny_batches(family, 1, 2, padded=False)[0].items() if not k.startswith("decoder")}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "num_beams": beams, "do_sample": False}
    with_cache = small.generate(**inputs, use_cache=True, **options)
    without = small.generate(**inputs, use_cache=False, **options)
    assert torch.equal(with_cache, without)
    assert with_cache.shape[1] >= 8


@pytest.mark.slow
@pytest.mark.parametrize("family", one_of_each(MAIN))
def test_torch_export(family: str) -> None:
    model, batch = tiny_model(family), tiny_batches(family, 1, 2, padded=False)[0]
    small = shrink(model, some_kept(structure_of(model), empty=(2,)))
    expected = outputs_of(small, batch)
    with frozen(small):  # no KV cache among the outputs
        program = torch.export.export(small, (), batch, strict=False)
    assert same(outputs_of(program.module(), batch), expected)


@pytest.mark.parametrize(
    "family", ["bert", "llama", "albert", "deberta", "swin", "cohere", "phi3", "moonshine", *PICKING]
)
def test_pruning_twice_is_pruning_once(family: str, tmp_path: Path) -> None:
    """The second cut counts heads in the first; what is indexed by head must count them in the dense model."""
    model, batch = tiny_model(family), tiny_batches(family, 1)[0]
    first = some_kept(structure_of(model), seed=1)
    once = shrink(model, first)
    second = some_kept(structure_of(once), seed=2)
    twice = shrink(once, second)
    at_once = shrink(model, [a[b] for a, b in zip(first, second, strict=True)])
    assert same(outputs_of(twice, batch), outputs_of(at_once, batch))
    twice.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert same(outputs_of(again, batch), outputs_of(twice, batch), 1e-6)


@pytest.mark.parametrize("empty", [(0,), (1,), (0, 1, 2, 3)])
def test_stock_loading_fails_loudly_even_when_only_whole_sublayers_are_gone(
    empty: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the shapes are all that tells, because someone took our notice out of the configuration."""
    model = tiny_model("bert")
    kept = [torch.arange(0 if number in empty else s.units) for number, s in enumerate(structure_of(model).sublayers)]
    shrink(model, kept).save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.PreTrainedModel, "post_init", transformers.PreTrainedModel.post_init.stock)
    with pytest.raises(RuntimeError, match="mismatch"):
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_a_smaller_class_of_the_family_loads_its_share(tmp_path: Path) -> None:
    """A pruned encoder-decoder gives its encoder alone; the edits of the decoder are passed over."""
    model, batch = tiny_model("t5"), tiny_batches("t5", 1)[0]
    small = shrink(model, some_kept(structure_of(model)))
    small.save_pretrained(tmp_path)
    encoder = transformers.T5EncoderModel.from_pretrained(tmp_path)
    inputs = {k: v for k, v in batch.items() if not k.startswith("decoder")}
    with torch.no_grad():
        expected = small.encoder(**inputs).last_hidden_state
        torch.testing.assert_close(encoder(**inputs).last_hidden_state, expected, atol=0, rtol=0)
