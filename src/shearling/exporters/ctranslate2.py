"""CTranslate2: BERT-like encoders with equal layers, without their head."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shearling.engine.silence import quiet_transformers
from shearling.errors import ModelError
from shearling.exporters.check import Outputs, Runner
from shearling.exporters.formats import Job
from shearling.exporters.graph import quiet_exporters
from shearling.exporters.inputs import Inputs
from shearling.models.structure import structure_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAMILIES = ("bert", "camembert", "distilbert", "roberta", "xlm-roberta")
QUANTIZATION = {"float32": "float32", "float16": "float16", "int8-dynamic": "int8"}


def unsuited(model: PreTrainedModel) -> str | None:
    """Why CTranslate2 cannot run the model, or None."""
    if model.config.model_type not in FAMILIES:
        return f"it is a {model.config.model_type}; encoders of CTranslate2 are {', '.join(FAMILIES)}"
    heads = {s.units for s in structure_of(model).sublayers if s.kind == "heads"}
    filters = {s.units for s in structure_of(model).sublayers if s.kind != "heads"}
    if heads != {model.config.num_attention_heads} or len(filters) != 1:
        return "its layers differ in size, and CTranslate2 reads one size for all; prune with --shape stock"
    return None


def runtime() -> str:
    """Name and version of the runtime."""
    import ctranslate2

    return f"CTranslate2 {ctranslate2.__version__}"


def write(job: Job) -> None:
    """Convert a plain checkpoint of the encoder with CTranslate2's converter."""
    from ctranslate2.converters import TransformersConverter

    if job.tokenizer is None:
        raise ModelError("CTranslate2 files include the vocabulary, but the model has no tokenizer.")
    with tempfile.TemporaryDirectory() as folder, quiet_exporters(), quiet_transformers(notes=True):
        job.model.save_pretrained(folder)
        job.tokenizer.save_pretrained(folder)
        # The converter reads this field, which transformers 5 no longer writes.
        path = Path(folder) / "config.json"
        config = {"position_embedding_type": "absolute"} | json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(config), encoding="utf-8")
        TransformersConverter(folder).convert(str(job.path), quantization=QUANTIZATION[job.precision], force=True)


def open_runner(path: Path) -> Runner:
    """Run the directory on the CPU: hidden states of real tokens, zeros for padding."""
    import ctranslate2

    encoder = ctranslate2.Encoder(str(path), device="cpu", compute_type="default")

    def run(inputs: Inputs) -> Outputs:
        ids, mask, kinds = inputs["input_ids"], inputs.get("attention_mask"), inputs.get("token_type_ids")
        lengths = [ids.shape[1]] * len(ids) if mask is None else mask.sum(dim=1).tolist()
        cut = [[row[:n].tolist() for row, n in zip(t, lengths, strict=True)] for t in (ids, kinds) if t is not None]
        found = encoder.forward_batch(cut[0], token_type_ids=cut[1] if kinds is not None else None)
        hidden = np.array(found.last_hidden_state)
        padded = np.pad(hidden, ((0, 0), (0, ids.shape[1] - hidden.shape[1]), (0, 0)))
        pooled = {} if found.pooler_output is None else {"pooler_output": np.array(found.pooler_output)}
        return {"last_hidden_state": padded, **pooled}

    return run
