"""Load the splits of GLUE and SQuAD from the Hugging Face Hub."""

from __future__ import annotations

from typing import Literal

from shearling.data.rows import Rows, as_rows
from shearling.data.tasks import Task, find_task
from shearling.errors import DataError

Split = Literal["train", "dev"]


def load_task_rows(task: Task | str, split: Split = "train") -> Rows:
    """Load the training or development split of a named task."""
    task = find_task(task)
    if task.hub is None:
        raise DataError(f"task {task.name} has no data set of its own on the Hub; pass --data FILE")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            f"taking {task.name} from the Hub needs datasets; run: pip install shearling[data], or pass --data FILE"
        ) from error
    name = task.hub.train if split == "train" else task.hub.dev
    try:
        dataset = load_dataset(task.hub.dataset, task.hub.config, split=name)
    # The error classes depend on the versions of datasets, huggingface_hub and their HTTP client.
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise DataError(
            f"the {split} split of {task.name} ({task.hub.dataset}) cannot be taken from the Hub: {reason}; "
            "check the network, or pass --data FILE"
        ) from error
    return as_rows(dataset, source=f"{task.hub.dataset} ({name})")
