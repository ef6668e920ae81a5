"""What the decoder of an encoder-decoder reads: the data's targets, or tokens that the model itself writes.

Encoder-decoders run on a source and a target. Where examples bring labels, the decoder reads them shifted by one
token, as in training. Where they bring neither labels nor decoder inputs, the model writes the targets, once: greedily,
so that they are the same for every seed, and are the texts that its decoder will see in use.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shearling.engine.hooks import device_of, frozen, run
from shearling.engine.memory import cut_batches
from shearling.engine.silence import quiet_transformers
from shearling.errors import DataError
from shearling.models.positions import positions_of
from shearling.sample.batch import IGNORED
from shearling.sample.read import MASK, reads_targets
from shearling.sample.sample import Column, Group, Sample

LONGEST = 128  # tokens of a target that the model writes


def with_targets(model: Any, sample: Sample) -> Sample:
    """The sample with inputs for the decoder, where the model has one that writes text and the sample has none."""
    if all(_has_inputs(group) for group in sample.groups):
        return sample
    if not reads_targets(model):
        _check_decoder(model, sample)
        return sample
    device = device_of(model)
    found: dict[int, Tensor] = {}  # by example: what its decoder reads
    written = False
    for group in sample.groups:
        own = replace(sample, groups=(group,))
        if _has_inputs(group):
            continue
        labelled = "labels" in group.columns and MASK in group.lengths
        written = written or not labelled
        for batch in cut_batches(own, torch.device("cpu") if labelled else device, backward=False):
            if labelled:
                tokens = list(shifted(model, batch.labels["labels"]))
            else:
                inputs = {k: v for k, v in batch.to(device).inputs.items() if k != MASK}
                tokens = [target_of(model, row)[0] for row in write(model, inputs).cpu()]
            found |= dict(zip(batch.indices.tolist(), tokens, strict=True))
    groups = tuple(_completed(group, found, _pad(model)) for group in sample.groups)
    note = ("the data has no targets: the model wrote them itself, greedily",) if written else ()
    return replace(sample, groups=groups, notes=(*sample.notes, *note))


def _has_inputs(group: Group) -> bool:
    return "decoder_input_ids" in group.columns or "decoder_inputs_embeds" in group.columns


def _check_decoder(model: Any, sample: Sample) -> None:
    """Complain about an encoder-decoder that neither writes text nor makes its decoder's inputs itself (`T5Model`)."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return
    try:
        with frozen(model), torch.inference_mode():
            run(model, sample.some(1).to(device_of(model)))
    except ValueError as error:
        raise DataError(
            f"This {type(model).__name__} has a decoder, and the examples bring nothing for it to read. Give batches "
            "with decoder_input_ids, or take the class with the language head, or the encoder alone."
        ) from error


def write(model: Any, inputs: dict[str, Tensor], longest: int = LONGEST) -> Tensor:
    """[B, T]: the tokens that the model writes greedily, the one that starts the decoder included, then padding."""
    config = copy.deepcopy(model.generation_config)
    for name in ("num_beams", "num_beam_groups", "early_stopping", "length_penalty", "do_sample", "temperature",
                 "top_p", "top_k", "max_length", "penalty_alpha", "typical_p"):  # fmt: skip
        if hasattr(config, name):
            setattr(config, name, None)  # of beams and samples
    positions = getattr(model.config, "max_target_positions", None) or positions_of(model.config)  # Whisper: two kinds
    longest = min(longest, (positions or longest + 1) - 1)
    config.update(do_sample=False, num_beams=1, use_cache=True, max_new_tokens=longest, pad_token_id=_pad(model))
    with frozen(model), torch.inference_mode(), quiet_transformers():
        return torch.as_tensor(model.generate(**inputs, generation_config=config)).clone()


def target_of(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(what the decoder reads, what it is to write) of one row that `write` gave, without its padding."""
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end]) - {None}
    stop = next((i for i, token in enumerate(tokens.tolist()) if i and token in ends), len(tokens) - 1)
    return tokens[:stop], tokens[1 : stop + 1]


def shifted(model: Any, labels: Tensor) -> Tensor:
    """[B, T]: what the decoder reads where it is to write `labels` (-100 where nothing)."""
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        return torch.as_tensor(model.prepare_decoder_input_ids_from_labels(labels=labels))
    start = next(
        (t for t in (model.config.decoder_start_token_id, model.config.bos_token_id) if t is not None), _pad(model)
    )
    rest = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, _pad(model))
    return torch.cat([labels.new_full((len(labels), 1), start), rest], 1)


def _completed(group: Group, found: dict[int, Tensor], pad: int) -> Group:
    """A group with the decoder's inputs, end to end."""
    if int(group.indices[0]) not in found:
        return group
    tokens = [found[int(i)] for i in group.indices]
    lengths = group.lengths.get(MASK, torch.tensor([len(t) for t in tokens]))  # of the labels, where they are shifted
    values = torch.cat([t[:length] for t, length in zip(tokens, lengths.tolist(), strict=True)])
    columns = group.columns | {"decoder_input_ids": Column(values, MASK, pad)}
    columns.setdefault(MASK, Column(torch.ones_like(values), MASK))
    return Group(columns, group.lengths | {MASK: lengths}, group.indices)


def _pad(model: Any) -> int:
    pad = getattr(model.config, "pad_token_id", None)
    return pad if isinstance(pad, int) and pad >= 0 else 0
