"""Load models, tokenizers and processors from a directory, a GGUF file or a Hub id."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shearling import schema
from shearling.checkpoint.load import check_files, check_index, check_weights, model_class, without_pooler
from shearling.checkpoint.sentence import attach_pooling, is_embedder, transformer_in
from shearling.engine.precision import DTYPES
from shearling.engine.silence import quiet_transformers
from shearling.errors import ModelError, ShearlingError
from shearling.files import RECORD
from shearling.models.pooling import Pooling
from shearling.models.structure import check_supported
from shearling.sample.read import reads_targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


ADAPTER = "adapter_config.json"
UNPACKED = ("fp8", "mxfp4", "shearling")  # transformers turns them into ordinary weights; our checkpoints of 0.1


def load_model(
    name: str,
    *,
    device: str = "auto",
    dtype: str | None = None,
    trust_remote_code: bool = False,
    pooling: str | Pooling | None = None,
) -> PreTrainedModel:
    """Load a model with the head of its checkpoint; raises if any weight is missing.

    pooling  of an embedding model, if its files do not have it
    """
    if _is_gguf(name):
        return _load_gguf(Path(name), named_device(device), dtype_of(dtype) or torch.float32)
    config = load_config(name, trust_remote_code=trust_remote_code)
    given, name = name, _transformer_of(name)
    path = Path(name)
    check_index(path)
    if any(path.glob("*.bin")) and not any(path.glob("*.safetensors")):
        raise ModelError(
            f"{name} holds its weights as a pickle (.bin), which can run arbitrary code when read, so it is not "
            "opened. If you trust it, from_pretrained(...).save_pretrained(...) of transformers converts it."
        )
    record = check_files(path)[0] if (path / RECORD).is_file() else None
    with _explained(f"Cannot load the model '{name}'", local=path.exists()):
        model, info = _class_of(config, name, trusted=trust_remote_code, pruned=record is not None).from_pretrained(
            name,
            dtype=dtype_of(dtype) or "auto",
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,  # never a pickle
        )
    bare = model.base_model is model
    untrained = sorted(without_pooler(model, info["missing_keys"]))
    if untrained:
        more = f" and {len(untrained) - 3} more" if len(untrained) > 3 else ""
        raise ModelError(
            f"{name} has no weights for {', '.join(untrained[:3])}{more}: this part of the model was never trained. "
            "Fine-tune the model first, or prune its bare encoder."
        )
    if record is not None:
        check_weights(model, set(), record, path)
    if bare and not reads_targets(model):  # T5 with a language head is its own base model
        attach_pooling(model, given, pooling)
    loaded: PreTrainedModel = model.eval().to(named_device(device))
    return loaded


def load_config(name: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model directory or Hub id."""
    from transformers import AutoConfig

    path = Path(_transformer_of(name))
    if (path / ADAPTER).is_file():
        raise ModelError(
            f"{name} holds a PEFT adapter; merge it into its model first: AutoPeftModelForCausalLM (or that of its "
            "task).from_pretrained(...).merge_and_unload().save_pretrained(...)."
        )
    if path.exists() and not (path / "config.json").is_file():
        raise ModelError(f"{name} has no config.json: it is not a model directory.")
    if path.exists():
        schema.DENSE_CONFIG.read(path / "config.json")
    with _explained(f"Cannot load the model '{name}'", local=path.exists()):
        config = AutoConfig.from_pretrained(_transformer_of(name), trust_remote_code=trust_remote_code)
    if is_embedder(name):
        config.architectures = None  # it may name a class with a head, which embeddings do not use
    return config


def _transformer_of(name: str) -> str:
    """The directory or Hub id of the transformer, which sentence-transformers may have in a subfolder."""
    return str(transformer_in(Path(name)) or name)


def check_prunable(name: str, *, trust_remote_code: bool = False) -> None:
    """Raise if the architecture is not supported or its weights are packed; reads only the configuration."""
    if _is_gguf(name):  # its configuration is inside the file
        return
    config = load_config(name, trust_remote_code=trust_remote_code)
    check_supported(config)
    packed = getattr(config, "quantization_config", None) or {}
    method = packed.get("quant_method") if isinstance(packed, dict) else getattr(packed, "quant_method", None)
    if packed and method not in UNPACKED:
        raise ModelError(
            f"The weights of {name} are quantised ({getattr(method, 'value', method)}): prune the model that they were "
            "made from, and quantise the result."
        )


def is_remote(thing: Any) -> bool:
    """Whether the class of a model, configuration or tokenizer is custom code of the model."""
    return type(thing).__module__.split(".")[0] == "transformers_modules"


def _is_gguf(name: str) -> bool:
    return name.endswith(".gguf") and Path(name).is_file()


def _load_gguf(path: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A language model in one GGUF file, dequantised; removes the marks of quantisation that transformers leaves."""
    from transformers import AutoModelForCausalLM

    with _explained(f"Cannot load the model '{path}'", local=True):
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype)
    model.is_quantized, model.hf_quantizer = False, None
    model.name_or_path = model.config._name_or_path = str(path)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    loaded: PreTrainedModel = model.eval().to(device)
    return loaded


def load_tokenizer(name: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer beside the model, or inside its GGUF file."""
    from transformers import AutoTokenizer

    path = Path(name)
    where, inside = (path.parent, {"gguf_file": path.name}) if _is_gguf(name) else (_transformer_of(name), {})
    with _explained(f"Cannot load a tokenizer from '{name}'", local=path.exists()):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(where), trust_remote_code=trust_remote_code, **inside
        )
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers creates an empty one without files
        raise ModelError(
            f"Cannot load a tokenizer from '{name}': its vocabulary is empty, so its files (tokenizer.json, vocab.txt, "
            "...) are missing. Copy them from the model it was fine-tuned from."
        )
    return tokenizer


def load_reader(name: str, model: PreTrainedModel, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer, image processor or audio feature extractor of a model."""
    from transformers import AutoFeatureExtractor, AutoImageProcessor

    takes = {"pixel_values": AutoImageProcessor, "input_values": AutoFeatureExtractor}
    found = (takes | {"input_features": AutoFeatureExtractor}).get(model.main_input_name)
    if found is None and getattr(model.config, "vision_config", None) is not None:
        raise ModelError(
            f"A {type(model).__name__} takes texts and images together; prune it from Python, with batches of "
            "input_ids, attention_mask and pixel_values: shearling.prune(model, batches, flops=0.5)."
        )
    if found is None:
        return load_tokenizer(name, trust_remote_code=trust_remote_code)
    with _explained(f"Cannot load a processor from '{name}'", local=Path(name).exists()):
        return found.from_pretrained(name, trust_remote_code=trust_remote_code)


def named_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"No device '{name}' here: {_first_words(error)}") from None
    return device


def _first_words(error: Exception) -> str:
    """The first sentence of what torch says: it goes on with every backend that it knows."""
    return str(error).splitlines()[0].split(". ")[0]


def dtype_of(name: str | None) -> torch.dtype | None:
    """A dtype by name; None keeps the checkpoint's own."""
    if name is None:
        return None
    if name not in DTYPES:
        raise ModelError(f"No dtype '{name}'; there are {', '.join(DTYPES)}.")
    return DTYPES[name]


def _class_of(config: Any, name: str, *, trusted: bool, pruned: bool) -> Any:
    from transformers import AutoModel

    auto_maps = ((getattr(config, "shearling", None) or {}).get("auto_map"), getattr(config, "auto_map", None))
    names = config.architectures
    return model_class(names[0], auto_maps, name, trusted=trusted, pruned=pruned) if names else AutoModel


@contextmanager
def _explained(what: str, *, local: bool) -> Iterator[None]:
    """Turn errors of transformers into a ModelError, with a hint about the network for Hub ids."""
    try:
        with quiet_transformers():
            yield
    except (ShearlingError, KeyboardInterrupt):
        raise
    except Exception as error:
        reason = re.sub(r"\s+", " ", str(error)).strip()[:300] or type(error).__name__
        hint = "" if local else " There is no directory of this name; a Hub id needs the network (or a filled cache)."
        raise ModelError(f"{what}.{hint} {reason}") from error
