"""SliceGPT (Ashkboos et al., ICLR 2024): a narrower residual stream in the basis of its principal components.

Before every sublayer the stream is rotated to the principal components of its normalised states, and only the first k
are kept. An RMS norm does not notice a rotation, so the rotations are multiplied into the projections around them; what
is left of them on the residual are two k x k matrices a layer, which are counted.

The pruned model is run in the original basis, where rotating, cutting and rotating back is a projection: the outputs
are the same as those of the narrow model. A norm on the way out of a sublayer (Gemma 2 and 3) does notice.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rivals.subject import Subject, Unsuited
from shearling.engine.hooks import frozen, split_call
from shearling.engine.layerwise import start_run
from shearling.models.structure import Stack, structure_of
from shearling.sample.batch import Batch


@dataclass
class Projections:
    """[D, D] projections of the stream: before each layer, inside it before the FFN, and behind the last layer."""

    before: list[Tensor]
    inside: list[Tensor]
    behind: Tensor


def slicegpt(subject: Subject, share: float) -> Any:
    """Every point of the stream cut to the width that the share of parameters allows."""
    stack = subject.structure.stacks[0]
    if stack.sublayers[0][-1].part.norm or len(stack.sublayers[0]) != 2:
        raise Unsuited("a norm between a sublayer and the residual changes under rotation")
    width = _width(subject, share)
    student = copy.deepcopy(subject.model)
    with frozen(student), torch.no_grad():
        found = _principal(subject, student, width)
    _install(student, structure_of(student).stacks[0], found)
    student.kept_share = _cost(subject, width) / subject.limit(share).dense  # of the narrow model
    return student


def _width(subject: Subject, share: float) -> int:
    """The largest k with k / D of the matrices, and 2 k^2 parameters more a layer, within the budget."""
    budget = subject.limit(share).budget
    return max(k for k in range(1, subject.model.config.hidden_size + 1) if k == 1 or _cost(subject, k) <= budget)


def _cost(subject: Subject, width: int) -> float:
    depth = len(subject.structure.stacks[0].layers)
    return subject.limit(1.0).dense * width / subject.model.config.hidden_size + 2 * depth * width**2


def _principal(subject: Subject, student: Any, width: int) -> Projections:
    """From the first layer to the last; each sees what the cuts before it have left."""
    stack = structure_of(student).stacks[0]
    batches = [Batch({"input_ids": ids}, {}, torch.arange(len(ids))) for ids in subject.batches()]
    run = start_run(student, stack, batches, "float32")
    states = [run.hidden[i] for i in range(len(batches))]
    before, inside = [], []
    for depth, layer in enumerate(stack.layers):
        before.append(_projection(states, width))
        states = [x @ before[-1] for x in states]
        middle = [_stream(stack, depth, x, run.call(i, depth)) for i, x in enumerate(states)]
        inside.append(_projection(middle, width))
        handles = _project_inside(stack, depth, inside[-1])
        for i, x in enumerate(states):
            call = run.call(i, depth)
            out = layer(x, *call.args, **call.kwargs)
            states[i] = out[0] if isinstance(out, tuple) else out
        for handle in handles:
            handle.remove()
    return Projections(before, inside, _projection(states, width))


def _projection(states: list[Tensor], width: int) -> Tensor:
    """[D, D]: onto the principal components of the normalised states."""
    gram: Any = 0.0
    for x in states:
        rows = torch.nn.functional.normalize(x.flatten(0, -2), dim=-1)
        gram = gram + (rows.T @ rows).double()
    vectors = torch.linalg.eigh(gram).eigenvectors[:, -width:]
    found: Tensor = (vectors @ vectors.T).to(states[0])
    return found


def _stream(stack: Stack, depth: int, x: Tensor, call: Any) -> Tensor:
    """The residual stream before the FFN of a layer."""
    seen: list[Tensor] = []
    residual = stack.sublayers[depth][-1].residual
    handle = residual.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    stack.layers[depth](x, *call.args, **call.kwargs)
    handle.remove()
    return seen[0]


def _project_inside(stack: Stack, depth: int, projection: Tensor) -> list[Any]:
    """Hooks that have the attention put out what makes the stream behind it lie in the projection's subspace."""
    entering: list[Tensor] = []

    def on_layer(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entering[:] = [split_call(args, kwargs)[0]]

    def on_attention(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        new = (entering[0] + first) @ projection - entering[0]
        return (new, *output[1:]) if isinstance(output, tuple) else new

    core = stack.sublayers[depth][0].core
    layer = stack.layers[depth].register_forward_pre_hook(on_layer, with_kwargs=True)
    return [layer, core.register_forward_hook(on_attention)]


def _install(student: Any, stack: Stack, found: Projections) -> None:
    """The projections as hooks of the student, for good."""
    for depth, layer in enumerate(stack.layers):
        layer.register_forward_pre_hook(_projecting(found.before[depth]), with_kwargs=True)
        _project_inside(stack, depth, found.inside[depth])
    student.base_model.norm.register_forward_pre_hook(_projecting(found.behind), with_kwargs=True)


def _projecting(projection: Tensor) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, rest, named = split_call(args, kwargs)
        return (hidden @ projection, *rest), named

    return hook
