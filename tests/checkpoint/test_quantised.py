"""A pruned checkpoint under real quantisers: loads, stays close, is saved and loaded again.

What is not installed is skipped: pip install bitsandbytes torchao optimum-quanto
"""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shearling
from shearling.models.shrink import shrink
from shearling.models.structure import structure_of
from tiny import batches_of, inputs_of

pytestmark = pytest.mark.filterwarnings("ignore")  # bitsandbytes and torchao warn about what this CPU lacks
LEFT = (1, 128, 2, 64, 0, 0)  # heads and filters of the three layers


def model_of(family: str) -> Any:
    """Layers of 2 heads and 256 filters; the sizes are what bitsandbytes takes in 4 bits on every CPU."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 256}
    if family == "bert":
        config: Any = transformers.BertConfig(vocab_size=60, num_labels=32, **sizes)
        return transformers.BertForSequenceClassification(config).eval()
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=128, n_layer=3, n_head=2, n_inner=256)
        return transformers.GPT2LMHeadModel(config).eval()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).eval()


@pytest.fixture(scope="module", params=["bert", "gpt2", "llama"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A checkpoint whose three layers differ, the last one without attention and FFN, and its outputs."""
    model = model_of(request.param)
    sublayers = structure_of(model).sublayers
    kept = [torch.arange(max(count, s.floor)) for s, count in zip(sublayers, LEFT, strict=True)]
    small = shrink(model, kept)
    folder = tmp_path_factory.mktemp(request.param)
    small.save_pretrained(folder)
    return folder, outputs(small)


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**inputs_of(batches_of(1)[0])).logits.float()


def bitsandbytes(**options: Any) -> Callable[[], Any]:
    return lambda: transformers.BitsAndBytesConfig(**options)


def torchao(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from torchao import quantization

        return transformers.TorchAoConfig(getattr(quantization, name)(**options))

    return make


CASES: dict[str, tuple[str, Callable[[], Any], float]] = {  # the package, its configuration, how far outputs may move
    "bitsandbytes int8": ("bitsandbytes", bitsandbytes(load_in_8bit=True), 0.05),
    "bitsandbytes nf4": ("bitsandbytes", bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"), 0.3),
    "torchao int8": ("torchao", torchao("Int8WeightOnlyConfig"), 0.05),
    "torchao int4": ("torchao", torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4), 0.5),
}


def needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Of every parameter, tied ones under each of their names: they are not tied yet while weights are loaded."""
    return {name: tuple(value.shape) for name, value in model.named_parameters(remove_duplicate=False)}


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A quantiser of our own, which needs no package: it notes the shapes it is given, and rounds every weight."""
    from transformers.quantizers import auto
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    shapes: dict[str, tuple[int, ...]] = {}

    class Config(QuantizationConfigMixin):
        def __init__(self, **options: Any) -> None:
            self.quant_method = "rounding"

    class Quantizer(HfQuantizer):
        is_serializable = is_trainable = True

        def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
            shapes.update(shapes_of(model))

        def _process_model_after_weight_loading(self, model: Any, **options: Any) -> Any:
            with torch.no_grad():
                for value in model.parameters():
                    value.copy_(value.mul(1024).round().div(1024))
            return model

    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "rounding", Config)
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "rounding", Quantizer)
    return Config(), shapes


def test_any_quantiser_meets_a_model_of_the_right_shape(rounding: Any, saved: tuple[Path, torch.Tensor]) -> None:
    config, shapes = rounding
    folder, expected = saved
    auto = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    model = auto.from_pretrained(folder, quantization_config=config)
    assert model.is_quantized
    assert shapes == shapes_of(auto.from_pretrained(folder))
    got = outputs(model)
    assert not torch.equal(got, expected)
    assert float((got - expected).abs().max() / expected.abs().max()) <= 0.2


@pytest.mark.parametrize("case", CASES)
def test_it_is_quantised_saved_and_loaded_again(case: str, saved: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    package, make, most = CASES[case]
    needs(package)
    folder, expected = saved
    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    auto = getattr(transformers, architecture)
    model = auto.from_pretrained(folder, quantization_config=make())
    assert model.is_quantized
    model.save_pretrained(tmp_path / "quantised")  # before it runs: then bitsandbytes repacks 4 bits for some CPUs
    got = outputs(model)
    assert float((got - expected).abs().max() / expected.abs().max()) <= most
    if package == "bitsandbytes" or "GPT2" not in architecture:  # torchao leaves the Conv1D of GPT-2 alone
        assert not torch.equal(got, expected)
    again = auto.from_pretrained(tmp_path / "quantised")
    assert again.is_quantized
    assert torch.equal(outputs(again), got)


def test_quanto(saved: tuple[Path, torch.Tensor]) -> None:
    """Transformers cannot save what quanto made, of any model."""
    needs("optimum")
    folder, expected = saved
    auto = getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
    model = auto.from_pretrained(folder, quantization_config=transformers.QuantoConfig(weights="int8"))
    assert float((outputs(model) - expected).abs().max() / expected.abs().max()) <= 0.05


@pytest.fixture
def uneven(tmp_path: Path) -> shearling.Pruned:
    """Pruned to widths that nothing divides."""
    pruned = shearling.prune(model_of("bert"), batches_of(), flops=0.6)
    pruned.save(tmp_path / "uneven")
    return pruned


def test_our_own_loader_quantises(uneven: shearling.Pruned, tmp_path: Path) -> None:
    needs("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = shearling.load(tmp_path / "uneven", quantization_config=config)
    expected = outputs(uneven.model)
    assert float((outputs(model) - expected).abs().max() / expected.abs().max()) <= 0.05
    with pytest.raises(shearling.ModelError, match="prune first"):
        shearling.prune(model, batches_of(), flops=0.5)


def test_four_bits_where_the_width_is_awkward(uneven: shearling.Pruned, tmp_path: Path) -> None:
    """What docs/faq.md says for CPUs on which bitsandbytes needs multiples of 64 and 32."""
    needs("bitsandbytes")
    linear = {name: m for name, m in uneven.model.named_modules() if isinstance(m, nn.Linear)}
    awkward = [name for name, m in linear.items() if m.in_features % 64 or m.out_features % 32]
    assert len(awkward) > 1
    config = transformers.BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=awkward)
    model = shearling.load(tmp_path / "uneven", quantization_config=config)
    expected = outputs(uneven.model)
    assert float((outputs(model) - expected).abs().max() / expected.abs().max()) <= 0.5


WITHOUT = """
import sys
sys.path[:0] = sys.argv[3:]
sys.modules["shearling"] = None  # it cannot be imported
import torch, transformers
transformers.logging.set_verbosity_error()
auto, ids = transformers.AutoModelForSequenceClassification, torch.arange(5, 17)[None]
config = transformers.BitsAndBytesConfig(load_in_8bit=True)
model = auto.from_pretrained(sys.argv[1], trust_remote_code=True, quantization_config=config)
model.save_pretrained(sys.argv[2])
again = auto.from_pretrained(sys.argv[2], trust_remote_code=True)
with torch.no_grad():
    assert torch.equal(again(ids).logits, model(ids).logits)
try:
    auto.from_pretrained(sys.argv[2])
except ValueError as error:
    assert "Run `import shearling` before loading it" in str(error), error
else:
    sys.exit("it was loaded with layers of another size")
"""


def test_quantised_and_saved_where_shearling_is_not_installed(uneven: shearling.Pruned, tmp_path: Path) -> None:
    """The quantised checkpoint is complete: it brings the file along, and is refused without it."""
    needs("bitsandbytes")
    bitsandbytes = importlib.import_module("bitsandbytes")
    environment = {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules"), "PATH": "/usr/bin:/bin"}
    packages = [str(Path(str(module.__file__)).parents[1]) for module in (transformers, bitsandbytes)]
    folders = [str(tmp_path / "uneven"), str(tmp_path / "quantised")]
    subprocess.run([sys.executable, "-I", "-c", WITHOUT, *folders, *packages], check=True, env=environment)
