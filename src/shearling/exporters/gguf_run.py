"""Run a GGUF file with llama.cpp if it is installed, else with a PyTorch implementation."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from shearling.exporters.check import Outputs, Runner
from shearling.exporters.inputs import Inputs

BINDING = "llama-cpp-cffi"  # package with a build of llama.cpp, imported as `llama`
CONTEXT = 2048  # tokens


def open_runner(path: Path) -> Runner:
    """Logits of every real token, zeros at padding."""
    engine = LlamaCpp(path) if has_llama_cpp() else TorchEngine(path)

    def run(inputs: Inputs) -> Outputs:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(dim=1).tolist()
        rows = [engine.logits(row[:length].tolist()) for row, length in zip(ids, lengths, strict=True)]
        whole = np.zeros((*ids.shape, rows[0].shape[-1]), dtype=np.float32)
        for number, row in enumerate(rows):
            whole[number, : len(row)] = row
        return {"logits": whole}

    return run


def runtime() -> str:
    """Name and version of the runtime."""
    if has_llama_cpp():
        return f"llama.cpp ({BINDING} {importlib.metadata.version(BINDING)})"
    return f"PyTorch {torch.__version__} reading the file; install {BINDING} to run it in llama.cpp"


def has_llama_cpp() -> bool:
    """Whether llama.cpp can be loaded: its library may need a newer system than the package says."""
    if importlib.util.find_spec("llama") is None:
        return False
    try:
        _library()
    except (ImportError, AttributeError):
        return False
    return True


def _library() -> Any:
    os.environ.setdefault("LLAMA_CPP_BACKEND", "cpu")
    from llama import llama_cpp

    return llama_cpp


class LlamaCpp:
    """A file loaded by llama.cpp on the CPU, through its C API."""

    def __init__(self, path: Path) -> None:
        found = _library()
        self.lib, self.ffi = found.lib, found.ffi
        self.model = self.lib.llama_model_load_from_file(str(path).encode(), self.lib.llama_model_default_params())
        if self.model == self.ffi.NULL:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        options = self.lib.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = CONTEXT
        options.n_threads = options.n_threads_batch = torch.get_num_threads()
        self.context = self.lib.llama_init_from_model(self.model, options)
        if self.context == self.ffi.NULL:
            raise RuntimeError(f"llama.cpp cannot run {path}: no context of {CONTEXT} tokens")
        self.vocabulary = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def __del__(self) -> None:
        if getattr(self, "context", None):
            self.lib.llama_free(self.context)
        if getattr(self, "model", None):
            self.lib.llama_model_free(self.model)

    def logits(self, tokens: list[int]) -> Any:
        """[tokens, vocabulary], from an empty cache."""
        self.lib.llama_kv_self_clear(self.context)
        return self._decode(tokens, 0, every=True)

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """Greedy generation of `count` tokens."""
        self.lib.llama_kv_self_clear(self.context)
        found = [int(self._decode(tokens, 0, every=False)[-1].argmax())]
        while len(found) < count:
            found.append(int(self._decode(found[-1:], len(tokens) + len(found) - 1, every=False)[-1].argmax()))
        return found

    def tokenize(self, text: str) -> list[int]:
        """Tokenise a text with the file's tokenizer, without special tokens."""
        data = text.encode()
        room = self.ffi.new("int32_t[]", len(data) + 8)
        vocabulary = self.lib.llama_model_get_vocab(self.model)
        count = self.lib.llama_tokenize(vocabulary, data, len(data), room, len(data) + 8, False, False)
        return [int(room[i]) for i in range(count)]

    def _decode(self, tokens: list[int], start: int, *, every: bool) -> Any:
        batch = self.lib.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
                batch.logits[i] = every or i == len(tokens) - 1
            if self.lib.llama_decode(self.context, batch) != 0:
                raise RuntimeError(f"llama.cpp cannot decode {len(tokens)} tokens from position {start}")
            rows = len(tokens) if every else 1
            data = self.lib.llama_get_logits(self.context)
            buffer = self.ffi.buffer(data, rows * self.vocabulary * 4)
            return np.frombuffer(buffer, dtype=np.float32).reshape(rows, self.vocabulary).copy()
        finally:
            self.lib.llama_batch_free(batch)


class TorchEngine:
    """A PyTorch implementation of llama, qwen2 and deci as in llama.cpp."""

    def __init__(self, path: Path) -> None:
        import gguf

        reader = gguf.GGUFReader(str(path))
        self.architecture = str(reader.fields["general.architecture"].contents())
        self.fields = {k.removeprefix(f"{self.architecture}."): f for k, f in reader.fields.items()}
        self.tensors = {
            t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32).copy())
            for t in reader.tensors
        }
        self.layers = int(self._value("block_count"))
        self.head = int(self._value("attention.key_length"))

    def _value(self, name: str) -> Any:
        return self.fields[name].contents()

    def _of_layer(self, name: str, layer: int) -> int:
        value = self._value(name)
        return int(value[layer] if isinstance(value, list) else value)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Any:
        """[tokens, vocabulary]"""
        hidden = self.tensors["token_embd.weight"][tokens]
        for layer in range(self.layers):
            if self._of_layer("feed_forward_length", layer) == 0:
                continue  # llama.cpp skips the whole layer
            hidden = (
                hidden + self._attention(hidden, layer) if self._of_layer("attention.head_count", layer) else hidden
            )
            hidden = hidden + self._ffn(hidden, layer)
        out = self.tensors.get("output.weight", self.tensors["token_embd.weight"])
        return (self._norm(hidden, "output_norm") @ out.T).numpy()

    def _attention(self, hidden: Tensor, layer: int) -> Tensor:
        x = self._norm(hidden, f"blk.{layer}.attn_norm")
        q, k, v = (
            self._linear(x, f"blk.{layer}.attn_{name}").unflatten(-1, (-1, self.head)).transpose(0, 1) for name in "qkv"
        )  # [heads or groups, tokens, head]
        mixed = F.scaled_dot_product_attention(
            self._rotate(q)[None], self._rotate(k)[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        return self._linear(mixed.transpose(0, 1).flatten(1), f"blk.{layer}.attn_output")

    def _ffn(self, hidden: Tensor, layer: int) -> Tensor:
        x = self._norm(hidden, f"blk.{layer}.ffn_norm")
        gate, up = (self._linear(x, f"blk.{layer}.ffn_{name}") for name in ("gate", "up"))
        return self._linear(F.silu(gate) * up, f"blk.{layer}.ffn_down")

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary embedding with adjacent pairs (0, 1), (2, 3) ...; half a head apart for qwen2."""
        power = torch.arange(0, self.head, 2, dtype=torch.float32) / self.head
        frequencies = float(self._value("rope.freq_base")) ** -power
        if "rope_freqs.weight" in self.tensors:
            frequencies = frequencies / self.tensors["rope_freqs.weight"]
        if "rope.scaling.factor" in self.fields:
            frequencies = frequencies / float(self._value("rope.scaling.factor"))
        angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * frequencies  # [tokens, head / 2]
        halves = self.architecture == "qwen2"
        a, b = x.chunk(2, dim=-1) if halves else (x[..., 0::2], x[..., 1::2])
        turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
        return torch.cat(turned, dim=-1) if halves else torch.stack(turned, dim=-1).flatten(-2)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        epsilon = float(self._value("attention.layer_norm_rms_epsilon"))
        return F.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], epsilon)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))
