"""A language model and its texts as a folder that needs neither tokenizer nor GGUF reader.

    pack.json         the model's configuration, where each tensor is, what was tokenised
    weights-NN.bin    the tensors, in files small enough to be carried one by one
    tokens.npz        the texts as token ids

Matrices that come from 4- and 8-bit files are stored in as many bits again. Every block of 32 weights in a row has
its own scale, as in the files, so that what is read back is what the file said.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32
CHUNK = 28 * 2**20
EXACT = 2e-3  # of a block's largest weight: the error up to which a coding is taken
CALIBRATION = 128  # windows
WINDOW = 1024  # tokens
CHOICES = 1000  # items at most

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Coded:
    """One tensor in the files: `parts` are (dtype, shape) of the arrays that follow each other."""

    name: str
    shape: tuple[int, ...]
    coding: str
    parts: list[tuple[str, tuple[int, ...]]]


def encode(name: str, values: Floats) -> tuple[Coded, list[NDArray[Any]]]:
    """A tensor in the fewest bits that keep it: blocks of 4 bits, of 8 bits, or as it is."""
    for coding in ("affine4", "signed8", "affine8"):
        if values.ndim != 2 or values.shape[1] % BLOCK:
            break
        arrays = _code(coding, values.reshape(-1, BLOCK))
        back = _decode(coding, arrays).reshape(values.shape)
        scale = np.abs(values.reshape(-1, BLOCK)).max(1, keepdims=True)
        error = np.abs(back - values).reshape(-1, BLOCK)
        if coding == "affine8" or (error <= EXACT * scale + 1e-12).all():
            return Coded(name, values.shape, coding, [(a.dtype.str, a.shape) for a in arrays]), arrays
    arrays = [values.astype(np.float32)]
    return Coded(name, values.shape, "float", [(arrays[0].dtype.str, values.shape)]), arrays


def _code(coding: str, blocks: Floats) -> list[NDArray[Any]]:
    if coding == "signed8":
        scale = (np.abs(blocks).max(1, keepdims=True) / 127).astype(np.float16)
        return [np.rint(_divided(blocks, scale)).clip(-127, 127).astype(np.int8), scale]
    levels = 15 if coding == "affine4" else 255
    least = blocks.min(1, keepdims=True).astype(np.float16)
    step = ((blocks.max(1, keepdims=True) - least) / levels).astype(np.float16)
    codes = np.rint(_divided(blocks - least, step)).clip(0, levels).astype(np.uint8)
    if coding == "affine4":
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return [codes, step, least]


def _divided(blocks: Floats, scale: NDArray[np.float16]) -> Floats:
    wide = scale.astype(np.float32)
    return np.divide(blocks, wide, out=np.zeros_like(blocks), where=wide != 0)


def _decode(coding: str, arrays: list[NDArray[Any]]) -> Floats:
    if coding == "float":
        return arrays[0]
    codes, scale, *least = arrays
    if coding == "affine4":
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    values: Floats = codes.astype(np.float32) * scale.astype(np.float32)
    return values + least[0].astype(np.float32) if least else values


def write_weights(model: torch.nn.Module, folder: Path) -> list[Coded]:
    """Every parameter once (tied ones under their first name), in files of at most `CHUNK` bytes."""
    index: list[Coded] = []
    data = bytearray()
    for name, parameter in model.named_parameters():
        coded, arrays = encode(name, parameter.detach().float().numpy())
        index.append(coded)
        for array in arrays:
            data += np.ascontiguousarray(array).tobytes()
    for number, start in enumerate(range(0, len(data), CHUNK)):
        (folder / f"weights-{number:02d}.bin").write_bytes(data[start : start + CHUNK])
    return index


def read_weights(folder: Path, index: list[dict[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder, in float32."""
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("weights-*.bin")))
    at = 0
    for entry in index:
        arrays = []
        for dtype, shape in entry["parts"]:
            array = np.frombuffer(data, dtype, count=int(np.prod(shape)), offset=at).reshape(shape)
            arrays.append(array)
            at += array.nbytes
        yield entry["name"], torch.from_numpy(_decode(entry["coding"], arrays).reshape(entry["shape"]).copy())
    if at != len(data):
        raise SystemExit(f"{folder} holds {len(data)} bytes of weights, expected {at}; carry all weights-*.bin files.")


def pack(model: Any, tokenizer: Any, data: Path, folder: Path, name: str) -> None:
    """Write a folder from a model, its tokenizer and the data sets beside each other in `data`."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("weights-*.bin"):
        old.unlink()
    index = write_weights(model, folder)
    bos = tokenizer.bos_token_id if model.config.model_type.startswith("gemma") else None
    tokens = texts(tokenizer, data, bos)
    np.savez_compressed(folder / "tokens.npz", **tokens)
    facts = {
        "name": name,
        "config": model.config.to_dict(),
        "class": type(model).__name__,
        "bos": bos,
        "tensors": [asdict(coded) for coded in index],
    }
    (folder / "pack.json").write_text(json.dumps(facts))


def unpack(folder: Path) -> tuple[Any, dict[str, NDArray[np.int32]], dict[str, Any]]:
    """(the model in float32 on the CPU, tokens by name, facts)."""
    import transformers

    facts = json.loads((folder / "pack.json").read_text())
    config = transformers.AutoConfig.for_model(facts["config"].pop("model_type"), **facts["config"])
    config.dtype = torch.float32
    model = getattr(transformers, facts["class"])(config)
    missing, unexpected = model.load_state_dict(dict(read_weights(folder, facts["tensors"])), strict=False)
    model.tie_weights()
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    if unexpected or set(missing) - tied:
        raise SystemExit(f"{folder} does not fit {facts['class']}: missing {missing}, unexpected {unexpected}.")
    with np.load(folder / "tokens.npz") as arrays:
        tokens = {key: arrays[key] for key in arrays.files}
    return model.float().eval(), tokens, facts


def texts(tokenizer: Any, data: Path, bos: int | None) -> dict[str, NDArray[np.int32]]:
    """Calibration and scoring texts as token ids."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def paragraphs(part: str) -> str:
        return "\n\n".join(dict.fromkeys(row["context"] for row in _rows(data / f"squad_v2.{part}.jsonl.xz")))

    return {
        "calibration": windows(ids(_text(data / "wikitext2.valid.txt.xz")), bos)[:CALIBRATION],
        "calibration_squad": windows(ids(paragraphs("train")), bos)[:CALIBRATION],
        "wikitext2": windows(ids(_text(data / "wikitext2.test.txt.xz")), bos),
        "squad": windows(ids(paragraphs("dev")), bos),
        **_choice_arrays(data, ids, bos),
    }


def windows(stream: list[int], bos: int | None) -> NDArray[np.int32]:
    """[windows, WINDOW]: the stream cut up, each piece behind the token that begins a text, if the model wants one."""
    inside = WINDOW - (bos is not None)
    count = len(stream) // inside
    cut = np.array(stream[: count * inside], dtype=np.int32).reshape(count, inside)
    return cut if bos is None else np.concatenate([np.full((count, 1), bos, np.int32), cut], 1)


def _choice_arrays(data: Path, ids: Any, bos: int | None) -> dict[str, NDArray[np.int32]]:
    """Four sequences an item, laid end to end: `choice_length` tokens each, the last `choice_answer` are the answer."""
    tokens: list[int] = []
    lengths, answers, right = [], [], []
    for prompt, candidates, correct in choice_items(data)[:CHOICES]:
        start = ([] if bos is None else [bos]) + ids(prompt)
        for candidate in candidates:
            answer = ids(" " + candidate)
            tokens += start + answer
            lengths.append(len(start) + len(answer))
            answers.append(len(answer))
        right.append(correct)
    arrays = {
        "choice_tokens": tokens,
        "choice_length": lengths,
        "choice_answer": answers,
        "choice_right": right,
    }
    return {name: np.array(values, dtype=np.int32) for name, values in arrays.items()}


def choice_items(data: Path) -> list[tuple[str, list[str], int]]:
    """(prompt, four answers, which one is right): the wrong ones answer other questions about the same paragraph."""
    rng = np.random.default_rng(0)
    items = []
    for part in ("dev", "train"):
        answers: dict[str, list[tuple[str, str]]] = {}
        for row in _rows(data / f"squad_v2.{part}.jsonl.xz"):
            if row["answers"]:
                answers.setdefault(row["context"], []).append((row["question"], row["answers"][0]["text"]))
        for context, pairs in answers.items():
            for question, answer in pairs:
                others = list(dict.fromkeys(a for _, a in pairs if a.lower() != answer.lower()))
                if len(others) >= 3:
                    wrong = [others[i] for i in rng.choice(len(others), 3, replace=False)]
                    place = int(rng.integers(4))
                    prompt = f"{context}\n\nQuestion: {question}\nAnswer:"
                    items.append((prompt, [*wrong[:place], answer, *wrong[place:]], place))
    return items


def _text(path: Path) -> str:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read()


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _text(path).splitlines()]
