"""Models with weights that accelerate's `device_map="auto"` offloaded to disk or host memory."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("shearling")


def with_all_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model, or a copy with all weights in memory where some are loaded only during a forward pass.

    Layers on several devices need no copy: statistics are accumulated on the layer's device.
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
    del whole.hf_device_map  # outdated; saving would look for the weights there
    return whole.to("cpu").eval()
