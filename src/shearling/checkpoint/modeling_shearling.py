"""Give a transformers model the shapes of a pruned checkpoint, before its weights are loaded.

shearling ships this file, unchanged, inside every checkpoint it writes, so that

    AutoModelForSequenceClassification.from_pretrained(directory, trust_remote_code=True)

works where shearling is not installed. It imports torch and transformers only. The shapes stand in `config.json`
under `quantization_config`, because a quantizer is what transformers lets change a model between its construction
and the loading of its weights. Nothing here is quantized; the quantizer takes itself off once the model is loaded.
"""

from typing import Any

import torch
import transformers
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

METHOD = "shearling"


class BiasOnly(nn.Module):
    """An output projection with no unit left: its bias, for every token."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        if hasattr(linear, "nf"):
            self.nf, self.nx = linear.nf, linear.nx

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(hidden) if self.bias is None else self.bias.expand_as(hidden)


class Hollow(nn.Module):
    """A sublayer's core with no unit left: hands its input on, or to the output projection inside it."""

    def __init__(self, core: nn.Module, out: str, returns: int) -> None:
        super().__init__()
        self._modules = core._modules
        self.out_path, self.returns = out, returns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        result = self.get_submodule(self.out_path)(hidden) if self.out_path else hidden
        return result if self.returns == 1 else (result, *[None] * (self.returns - 1))


def resize(module: Any, rows: int, columns: int) -> None:
    """Make a linear module [rows, columns]; the values are left to the caller."""
    transposed = hasattr(module, "nf")
    weight, bias = module.weight, module.bias
    shape = (columns, rows) if transposed else (rows, columns)
    module.weight = nn.Parameter(weight.new_empty(shape), requires_grad=weight.requires_grad)
    if bias is not None:
        module.bias = nn.Parameter(bias.new_empty(rows), requires_grad=bias.requires_grad)
    if transposed:
        module.nf, module.nx = rows, columns
    else:
        module.out_features, module.in_features = rows, columns


def reshape(model: nn.Module, edits: dict[str, Any]) -> None:
    """Apply a checkpoint's edits. Paths start at the base model, so that every head loads the same checkpoint.

    linear      {path: [outputs, inputs]}
    attributes  {path.name: value}
    bias_only   [path]                        output projections with no unit left
    hollow      {path: [out, returns]}        cores with no unit left
    """
    base = getattr(model, "base_model", model)
    for path, (rows, columns) in edits["linear"].items():
        resize(base.get_submodule(path), rows, columns)
    for path, value in edits["attributes"].items():
        owner, _, name = path.rpartition(".")
        setattr(base.get_submodule(owner), name, value)
    for path in edits["bias_only"]:
        _replace(base, path, BiasOnly(base.get_submodule(path)))
    for path, (out, returns) in edits["hollow"].items():
        _replace(base, path, Hollow(base.get_submodule(path), out, returns))


def _replace(base: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    module.train(base.training)
    setattr(base.get_submodule(owner), name, module)


class ShearlingConfig(QuantizationConfigMixin):
    """The edits, as they stand in `config.json`."""

    def __init__(self, edits: dict[str, Any], version: int = 1, **_: Any) -> None:
        self.quant_method = METHOD
        self.version = version
        self.edits = edits


class ShearlingQuantizer(HfQuantizer):
    """Reshapes the empty model, lets the weights load, and takes itself off again."""

    def _process_model_before_weight_loading(self, model: nn.Module, **kwargs: Any) -> None:
        reshape(model, self.quantization_config.edits)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False
        for module in model.modules():
            if isinstance(module, transformers.PreTrainedModel):
                module.config._is_quantized = False
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def register() -> None:
    """Make transformers know the method; doing it twice changes nothing."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, ShearlingConfig)
    auto.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, ShearlingQuantizer)


register()


def __getattr__(name: str) -> type:
    """A stand-in for each `AutoModel...` class: what `auto_map` in `config.json` points to."""
    if not name.startswith("AutoModel"):
        raise AttributeError(name)

    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        return getattr(transformers, name).from_pretrained(*args, **kwargs | {"trust_remote_code": False})

    def register_for_auto_class(cls: type, auto_class: Any = None) -> None:
        """Transformers announces the class it found; there is nothing to remember."""

    methods = {"from_pretrained": from_pretrained, "register_for_auto_class": register_for_auto_class}
    return type(name, (), {key: classmethod(method) for key, method in methods.items()})
