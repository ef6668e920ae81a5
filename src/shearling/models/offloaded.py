"""Models with offloaded weights: `device_map="auto"` of accelerate may leave some on the disk or on the host."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("shearling")


def with_all_weights(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or, where some weights are only fetched for a forward pass, a copy that holds all of them.

    Layers on several devices need no copy: what is summed over the sample lives where the layer lives.
    """
    offloaded = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if not offloaded or getattr(model, "hf_device_map", None) is None:
        return model
    from accelerate.hooks import remove_hook_from_module
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    logger.warning("%d weights are offloaded; pruning a copy that is held in memory, on the CPU.", len(offloaded))
    fetched = {name: value.detach().clone() for name, value in get_state_dict_offloaded_model(model).items()}
    whole = copy.deepcopy(model)
    remove_hook_from_module(whole, recurse=True)
    whole.load_state_dict(fetched, strict=False, assign=True)
    whole.tie_weights()
    del whole.hf_device_map  # it says where the weights were; saving would look for them there
    return whole.to("cpu").eval()
