"""Tokenizer, processor and other files that accompany the weights of a model."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shearling.checkpoint.sentence import MODULES, modules_with_transformer_on_top, transformer_in
from shearling.errors import OutputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("shearling")

# Tokenizer, processor, generation and sentence-transformers files.
COMPANIONS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.spm", "*.model",
    "spiece*", "sentencepiece*", "*preprocessor_config.json", "processor_config.json", "chat_template*",
    "generation_config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "[0-9]_*", "LICENSE*", "NOTICE*",
)  # fmt: skip
# A tokenizer or processor has at least one of these.
READERS = (
    "tokenizer.json", "tokenizer.model", "vocab*", "*.spm", "*.model", "spiece*", "sentencepiece*",
    "*preprocessor_config.json", "processor_config.json",
)  # fmt: skip
# Files whose `auto_map` may name a custom tokenizer or processor class.
NAMING = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def write_companions(source: Any, model: PreTrainedModel, folder: Path) -> bool:
    """Write the files that accompany the model; returns whether they include a tokenizer or processor.

    source  a directory, a Hub id in the local cache, or a tokenizer or processor; default: where the model came from
    """
    if source is None or isinstance(source, (str, os.PathLike)):
        origin = found_locally((getattr(model, "name_or_path", None) or "") if source is None else source)
        if origin is not None:
            copy_companions(origin, folder)
        elif source is not None:
            raise OutputError(
                f"source={str(source)!r} is neither a directory nor in the local cache of the Hub, so there is no "
                "tokenizer to save with the model. Give a directory, or the tokenizer itself: source=tokenizer."
            )
    else:
        source.save_pretrained(folder)  # a tokenizer or processor
    found = any(True for pattern in READERS for _ in folder.glob(pattern))
    if not found:
        reader, lost = ("tokenizer", "not know a single word") if reads_text(model) else ("processor", "take no input")
        logger.warning(
            f"No {reader} was found, so the pruned model is saved without one, and a pipeline made from it would "
            f"{lost}. Pass it: save(..., source={reader}), or its directory."
        )
    return found


def reads_text(model: PreTrainedModel) -> bool:
    """Whether the model starts from tokens, not from images or sound."""
    return model.main_input_name in ("input_ids", "inputs_embeds")


def found_locally(name: str | os.PathLike[str], *, fetch: bool = False) -> Path | None:
    """The directory of this name, or of this Hub id in the local cache; `fetch` may download it."""
    if not str(name):
        return None
    path = Path(name)
    if path.is_dir():
        return path
    if not HUB_ID.fullmatch(str(name)) or path.exists():
        return None
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(name), allow_patterns=list(COMPANIONS), local_files_only=not fetch))
    except Exception:  # the error for a missing model differs between versions
        return None


def copy_companions(source: Path, folder: Path) -> None:
    """Copy the files beside the weights of a model directory; existing files are kept."""
    own_modules = (folder / MODULES).exists()  # saved by a SentenceTransformer, whose modules may differ
    inside = transformer_in(source)  # sentence-transformers may have the model in a subfolder
    if inside is not None and inside != source:
        if not own_modules:
            (folder / MODULES).write_text(modules_with_transformer_on_top(source), encoding="utf-8")
        copy_companions(inside, folder)
    for pattern in COMPANIONS:
        for path in sorted(source.glob(pattern)):
            if path == inside:
                continue
            if path.is_dir():
                if not own_modules:
                    shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
            elif not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)
    for path in _reader_code(source):
        shutil.copyfile(path, folder / path.name)


def _reader_code(source: Path) -> list[Path]:
    """The Python files of a custom tokenizer or processor; custom model classes save their own."""
    from transformers.dynamic_module_utils import get_relative_import_files

    found = []
    for name in NAMING:
        try:
            named = json.loads((source / name).read_text(encoding="utf-8")).get("auto_map") or {}
        except (OSError, ValueError, AttributeError):
            continue
        places = [place for auto, place in named.items() if not auto.startswith(("AutoModel", "AutoConfig"))]
        for place in (one for some in places for one in (some if isinstance(some, list) else [some])):
            file = str(place).rpartition("--")[2].partition(".")[0]
            if file.isidentifier() and (source / f"{file}.py").is_file():
                found += [source / f"{file}.py", *map(Path, get_relative_import_files(source / f"{file}.py"))]
    return found
