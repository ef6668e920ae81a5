"""Give a transformers model the shapes of a pruned checkpoint, before its weights are loaded.

shearling ships this file, unchanged, inside every checkpoint it writes, so that

    AutoModelForSequenceClassification.from_pretrained(directory, trust_remote_code=True)

works where shearling is not installed. It imports torch and transformers only. The shapes stand in `config.json`
under `quantization_config`, because a quantizer is what transformers lets change a model between its construction
and the loading of its weights. Nothing here is quantized; the quantizer takes itself off once the model is loaded.
"""

import inspect
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
    """A sublayer's core with no unit left: hands its input on, or to the output projection inside it.

    An argument that the core would hand on to the next layer is still handed on.
    """

    def __init__(self, core: nn.Module, out: str, returns: int, argument: str = "", returned: int = -1) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = core._modules, core._parameters, core._buffers
        self.out_path, self.returns, self.returned = out, returns, returned
        self.argument = argument
        self.place = _place(core, argument) if returned >= 0 else -1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        result = self.get_submodule(self.out_path)(hidden) if self.out_path else hidden
        if self.returns == 1:
            return result
        values = [result, *[None] * (self.returns - 1)]
        if self.returned >= 0:
            values[self.returned] = args[self.place] if self.place < len(args) else kwargs.get(self.argument)
        return tuple(values)


class Picking:
    """Stands in for the `forward` of a core that kept only some heads, and is handed a tensor with all of them.

    argument  that tensor, [., heads, queries, keys]; one without a slice for each head is left as it is
    made_by   the method of the core that makes the tensor when none is handed in
    returned  the place among the core's return values where the whole tensor is handed on, or -1
    """

    def __init__(self, core: nn.Module, argument: str, heads: list[int], made_by: str, returned: int) -> None:
        self.core, self.argument, self.heads = core, argument, heads
        self.made_by, self.returned = made_by, returned
        self.place = _place(core, argument)
        self.whole: Any = None
        if made_by:
            setattr(core, made_by, self.make)

    def pick(self, whole: torch.Tensor) -> torch.Tensor:
        """The slices of the heads that are left."""
        return whole if whole.shape[1] == 1 else torch.stack([whole[:, head] for head in self.heads], dim=1)

    def make(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the core makes itself: remembered whole, used in part."""
        self.whole = getattr(type(self.core), self.made_by)(self.core, *args, **kwargs)
        return self.pick(self.whole)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = args[self.place] if self.place < len(args) else kwargs.get(self.argument)
        if given is not None and self.place < len(args):
            args = (*args[: self.place], self.pick(given), *args[self.place + 1 :])
        elif given is not None:
            kwargs = kwargs | {self.argument: self.pick(given)}
        result = type(self.core).forward(self.core, *args, **kwargs)
        if self.returned >= 0:
            whole = self.whole if given is None else given
            result = (*result[: self.returned], whole, *result[self.returned + 1 :])
        self.whole = None
        return result


class OwnConfig:
    """The configuration as one module sees it: some counts of its own, everything else the model's."""

    def __init__(self, shared: Any, counts: dict[str, int]) -> None:
        vars(self).update(shared=shared, counts=counts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "counts" not in vars(self):  # a copy that is still empty
            raise AttributeError(name)
        return self.counts[name] if name in self.counts else getattr(self.shared, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.shared, name, value)


def _place(core: nn.Module, argument: str) -> int:
    """Where an argument stands when it is not named."""
    return list(inspect.signature(type(core).forward).parameters).index(argument) - 1  # after self


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
    attributes  {path.name: value}            also of a module's configuration: {path.config.name: value}
    parameters  {path.name: [dimension, size]}    parameters that are not part of a linear module
    bias_only   [path]                        output projections with no unit left
    hollow      {path: [out, returns]}        cores with no unit left
    picks       {path: {argument, heads, made_by, returned}}    cores that index an argument by the heads left

    What a smaller class of the same family lacks (a decoder, a tower) is passed over; were it not lacking, the
    shapes of its weights would not fit, and loading would fail.
    """
    base = getattr(model, "base_model", model)
    picks = edits.get("picks", {})
    for path, (rows, columns) in edits["linear"].items():
        if (linear := _find(base, path)) is not None:
            resize(linear, rows, columns)
    for path, value in edits["attributes"].items():
        owner, _, name = path.rpartition(".")
        if (module := _find(base, owner.removesuffix(".config"))) is not None:
            if owner.endswith(".config"):
                shared, counts = module.config, {}
                if isinstance(shared, OwnConfig):
                    shared, counts = shared.shared, shared.counts
                name, value = "config", OwnConfig(shared, counts | {name: value})
            setattr(module, name, value)
    for path, (dim, size) in edits.get("parameters", {}).items():
        owner, _, name = path.rpartition(".")
        old = getattr(module := _find(base, owner), name, None)
        if isinstance(old, nn.Parameter):
            shape = (*old.shape[:dim], size, *old.shape[dim + 1 :])
            setattr(module, name, nn.Parameter(old.new_empty(shape), requires_grad=old.requires_grad))
    for path in edits["bias_only"]:
        if (out := _find(base, path)) is not None:
            _replace(base, path, BiasOnly(out))
    for path, pick in picks.items():
        if path not in edits["hollow"] and (core := _find(base, path)) is not None:
            core.forward = Picking(core, pick["argument"], pick["heads"], pick["made_by"], pick["returned"])
    for path, (inside, returns) in edits["hollow"].items():
        core = _find(base, path)
        if core is not None and not isinstance(core, Hollow):
            pick = picks.get(path, {})
            _replace(base, path, Hollow(core, inside, returns, pick.get("argument", ""), pick.get("returned", -1)))


def _find(base: nn.Module, path: str) -> Any:
    try:
        return base.get_submodule(path)
    except AttributeError:
        return None


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
