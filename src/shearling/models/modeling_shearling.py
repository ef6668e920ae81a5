"""Reshape a transformers model to a pruned checkpoint before its weights are loaded.

shearling ships this file, unchanged, inside every checkpoint it writes, so that

    AutoModelForSequenceClassification.from_pretrained(directory, trust_remote_code=True)

works where shearling is not installed. It imports torch and transformers only. The shapes are in `config.json` under
`shearling`. Every transformers model calls `post_init` at the end of its constructor; `register` wraps that call and
reshapes models whose configuration has such shapes. Weights, quantisers and adapters are loaded later, into a model
of the right shape. Saving such a model writes this file again.

Custom code of the dense model is kept: `auto_map` names this file, so that it runs first, and `shearling.auto_map`
names the custom class.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

VERSION = 2  # of the edits in config.json; version 1 was stored under `quantization_config`
# Value of `transformers_weights` in config.json. Transformers takes it for the name of the weights file and quotes it
# in its error when this file was not imported. Loading only the configuration or the tokenizer still works.
NOTICE = (
    "this model was pruned by shearling and its layers differ in size. Run `import shearling` before loading it, or "
    "pass trust_remote_code=True to the from_pretrained of an AutoModel class"
)
OWN_NOTICE = (
    "this model was pruned by shearling and its class comes with it. Pass trust_remote_code=True to the "
    "from_pretrained of an AutoModel class"
)


class BiasOnly(nn.Module):
    """An output projection with no unit left: returns its bias for every token."""

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
    """A sublayer's core with no unit left: returns its input, or applies the output projection inside it.

    An argument that the core passes on to the next layer is still passed on.
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
    """Mixin for the class of a core that kept only some heads but receives a tensor with all of them.

    argument  that tensor, [., heads, queries, keys]; left unchanged if it has no slice per head
    heads     indices of the kept heads in the dense model
    made_by   method of the core that computes the tensor when none is passed
    returned  index among the core's return values at which the whole tensor is passed on, or -1

    A mixin instead of a hook bound to the core, so that replicas (`torch.nn.DataParallel`, `copy.copy`) use their own
    parameters.
    """

    argument: str
    heads: list[int]
    made_by: str
    returned: int
    place: int
    whole: Any

    def pick(self, whole: torch.Tensor) -> torch.Tensor:
        """The slices of the kept heads."""
        return whole if whole.shape[1] == 1 else torch.stack([whole[:, head] for head in self.heads], dim=1)

    def make(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute the tensor with the core's own method; keep it whole, return the kept slices."""
        self.whole = getattr(super(), self.made_by)(*args, **kwargs)
        return self.pick(self.whole)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = args[self.place] if self.place < len(args) else kwargs.get(self.argument)
        if given is not None and self.place < len(args):
            args = (*args[: self.place], self.pick(given), *args[self.place + 1 :])
        elif given is not None:
            kwargs = kwargs | {self.argument: self.pick(given)}
        result = super().forward(*args, **kwargs)  # type: ignore[misc]
        if self.returned >= 0:
            whole = self.whole if given is None else given
            result = (*result[: self.returned], whole, *result[self.returned + 1 :])
        self.whole = None
        return result

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle and deepcopy: the mixed class cannot be imported by name, so it is created again."""
        return _new_picking, (_class_of(self), self.made_by), self.__dict__


def _picking(core: type, made_by: str) -> type:
    """The class of a core with `Picking` mixed in."""
    methods = {made_by: Picking.make} if made_by else {}
    return type(core.__name__, (Picking, core), methods | {"__module__": core.__module__, "stock": core})


def _new_picking(core: type, made_by: str) -> Any:
    picking: Any = _picking(core, made_by)
    return picking.__new__(picking)


def _class_of(core: Any) -> type:
    """The core's original class, also where another copy of this file has mixed in its own `Picking`."""
    return getattr(type(core), "stock", type(core))


class OwnConfig:
    """A module's view of the configuration: overrides some counts, shares everything else with the model."""

    def __init__(self, shared: Any, counts: dict[str, int]) -> None:
        vars(self).update(shared=shared, counts=counts)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "counts" not in vars(self):  # during copying, before attributes are set
            raise AttributeError(name)
        return self.counts[name] if name in self.counts else getattr(self.shared, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.shared, name, value)


def _place(core: nn.Module, argument: str) -> int:
    """The index of a positional argument."""
    return list(inspect.signature(_class_of(core).forward).parameters).index(argument) - 1  # type: ignore[attr-defined]


def pick_heads(core: Any, pick: dict[str, Any]) -> None:
    """Make a core use only the slices of its kept heads."""
    place = _place(core, pick["argument"])
    core.__class__ = _picking(_class_of(core), pick["made_by"])
    vars(core).update(pick, place=place, whole=None)
    if "_old_forward" in vars(core):  # accelerate's forward, on the instance, calls this one
        core._old_forward = core.__class__.forward.__get__(core)


def resize(module: Any, rows: int, columns: int) -> None:
    """Resize a linear module to [rows, columns]; the caller fills in the weights."""
    transposed = hasattr(module, "nf")
    weight, bias = module.weight, module.bias
    cut = (weight[:columns, :rows] if transposed else weight[:rows, :columns]).detach().clone()
    module.weight = nn.Parameter(cut, requires_grad=weight.requires_grad)
    if bias is not None:
        module.bias = nn.Parameter(bias[:rows].detach().clone(), requires_grad=bias.requires_grad)
    if transposed:
        module.nf, module.nx = rows, columns
    else:
        module.out_features, module.in_features = rows, columns


def _shape(linear: Any) -> tuple[int, ...]:
    shape = tuple(linear.weight.shape)
    return shape[::-1] if hasattr(linear, "nf") else shape


def reshape(model: nn.Module, edits: dict[str, Any]) -> None:
    """Apply a checkpoint's edits. Paths are relative to the base model, so that every head loads the same checkpoint.

    linear      {path: [outputs, inputs]}
    attributes  {path.name: value}            also of a module's configuration: {path.config.name: value}
    parameters  {path.name: [dimension, size]}    parameters that are not part of a linear module
    bias_only   [path]                        output projections with no unit left
    hollow      {path: [out, returns]}        cores with no unit left
    dropped     [path]                        projections into no unit; quantisers fail on empty matrices
    picks       {path: {argument, heads, made_by, returned}}    cores that index an argument by their kept heads

    Modules that a smaller class of the family lacks (a decoder, a tower) are skipped; where a module is missing by
    mistake, loading fails because of the weights' shapes. Idempotent: a model and its base model both call `post_init`.
    """
    base = getattr(model, "base_model", model)
    picks = edits.get("picks", {})
    for path, (rows, columns) in edits["linear"].items():
        if (linear := _find(base, path)) is not None and _shape(linear) != (rows, columns):
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
        if (out := _find(base, path)) is not None and not isinstance(out, BiasOnly):
            _replace(base, path, BiasOnly(out))
    for path, pick in picks.items():
        if path not in edits["hollow"] and (core := _find(base, path)) is not None:
            pick_heads(core, pick)
    for path, (inside, returns) in edits["hollow"].items():
        core = _find(base, path)
        if core is not None and not isinstance(core, Hollow):
            pick = picks.get(path, {})
            _replace(base, path, Hollow(core, inside, returns, pick.get("argument", ""), pick.get("returned", -1)))
    for path in edits.get("dropped", []):
        owner, _, name = path.rpartition(".")
        if (module := _find(base, owner)) is not None:
            module._modules.pop(name, None)


def _find(base: nn.Module, path: str) -> Any:
    """The module at a path, or None. A CLIP tower is a model of its own in one class and a submodule in another."""
    for candidate in (path, path.removeprefix("text_model.").removeprefix("vision_model.")):
        try:
            return base.get_submodule(candidate)
        except AttributeError:
            continue
    return None


def _replace(base: nn.Module, path: str, module: nn.Module) -> None:
    owner, _, name = path.rpartition(".")
    module.train(base.training)
    setattr(_find(base, owner), name, module)


def register() -> None:
    """Wrap model construction and configuration saving; idempotent.

    Several copies of this file may be loaded, shearling's and those of checkpoints: the newest version wins.
    """
    _wrap(PreTrainedModel, "post_init", _reshape_first)
    _wrap(PreTrainedConfig, "to_json_file", _add_notice)


def _wrap(owner: Any, name: str, wrapper: Any) -> None:
    found = getattr(owner, name)
    if getattr(found, "shearling", 0) < VERSION:
        stock = getattr(found, "stock", found)

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(stock, self, *args, **kwargs)

        vars(method).update(shearling=VERSION, stock=stock)
        setattr(owner, name, method)


def _reshape_first(post_init: Any, model: Any) -> None:
    """Reshape a model before transformers initialises or loads its weights."""
    if shapes := getattr(model.config, "shearling", None):
        if shapes["version"] > VERSION:
            raise ValueError(f"{model.name_or_path} was written by a newer version of shearling; update shearling.")
        reshape(model, shapes["edits"])
    post_init(model)


def _add_notice(to_json_file: Any, config: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    """Save the notice and the file that `auto_map` points to."""
    if not getattr(config, "shearling", None):
        to_json_file(config, path, *args, **kwargs)
        return
    shapes: dict[str, Any] = config.shearling
    named: dict[str, str] = getattr(config, "auto_map", None) or {}
    if own := _own_classes(config, Path(path).parent):
        config.shearling = shapes | {"auto_map": own}
        config.auto_map = named | {name: f"modeling_shearling.{name}" for name in own}
    config.transformers_weights = OWN_NOTICE if own else NOTICE
    try:
        to_json_file(config, path, *args, **kwargs)
    finally:
        config.shearling = shapes
        if own:
            config.auto_map = named
        del config.transformers_weights
    if named:
        Path(path).with_name("modeling_shearling.py").write_bytes(Path(__file__).read_bytes())


def _own_classes(config: Any, folder: Path) -> dict[str, str]:
    """Maps each `AutoModel...` name to a custom class in a file beside the weights: `{name: file.class}`."""
    named = (getattr(config, "auto_map", None) or {}) | config.shearling.get("auto_map", {})
    own = {name: str(place) for name, place in named.items() if name.startswith("AutoModel")}
    files = {name: place.rpartition("--")[2].partition(".")[0] for name, place in own.items()}
    return {
        name: place
        for name, place in own.items()
        if files[name] != "modeling_shearling" and (folder / f"{files[name]}.py").is_file()
    }


register()


def _own_class(name: str, config: Any, place: Any, options: dict[str, Any]) -> Any:
    """The custom class of the dense model, or None for a class of transformers. The caller trusts its code."""
    own = (getattr(config, "shearling", None) or {}).get("auto_map", {})
    if name not in own:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.auto_factory import add_generation_mixin_to_remote_model

    config.auto_map = config.auto_map | own  # as in the dense model
    found = get_class_from_dynamic_module(own[name], place, **options)
    found.register_for_auto_class(name)  # saving the model also saves its code
    return add_generation_mixin_to_remote_model(found)


def __getattr__(name: str) -> type:
    """A proxy for each `AutoModel...` class, the target of `auto_map` in `config.json`."""
    if not name.startswith("AutoModel"):
        raise AttributeError(name)

    def from_pretrained(cls: type, place: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("config")
        if config is not None:
            vars(config).pop("transformers_weights", None)  # only for loading without this file
        if own := _own_class(name, config, place, kwargs):
            return own.from_pretrained(place, *args, **kwargs)
        return getattr(transformers, name).from_pretrained(place, *args, **kwargs | {"trust_remote_code": False})

    def from_config(cls: type, config: Any, **kwargs: Any) -> Any:
        if own := _own_class(name, config, config.name_or_path, {}):
            return own._from_config(config, **kwargs)
        return getattr(transformers, name).from_config(config, **kwargs | {"trust_remote_code": False})

    def register_for_auto_class(cls: type, auto_class: Any = None) -> None:
        """Called by transformers for custom classes; nothing to do."""

    methods: dict[str, Any] = {
        "from_pretrained": from_pretrained,
        "_from_config": from_config,
        "register_for_auto_class": register_for_auto_class,
    }
    return type(name, (), {key: classmethod(method) for key, method in methods.items()})
