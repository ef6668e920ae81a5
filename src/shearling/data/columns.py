"""Find and validate the text and label columns of a task."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shearling.data.rows import Rows
from shearling.data.tasks import Task
from shearling.errors import DataError
from shearling.sample.batch import IGNORED
from shearling.schema.rules import shown

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_log = logging.getLogger(__name__)
WHOLE = re.compile(r"-?\d+(\.0*)?")  # pandas writes the classes of a column with gaps as 0.0 and 1.0


def find_text_columns(rows: Rows, task: Task, given: Sequence[str] | None = None) -> tuple[str, ...]:
    """The names of the one or two text columns."""
    if given:
        missing = [name for name in given if name not in rows.names]
        if missing:
            raise DataError(f"{rows.source} has no column {missing[0]!r}; it has {list(rows.names)}")
        counts = sorted({len(names) for names in task.text})
        if len(given) not in counts:
            wanted = " or ".join(map(str, counts))
            raise DataError(
                f"task {task.name} takes {wanted} text column(s), {len(given)} were given: {', '.join(given)}"
            )
        return tuple(given)
    for names in task.text:
        if all(name in rows.names for name in names):
            return names
    strings = [name for name in rows.names if isinstance(rows.column(name)[0], str) and name not in task.label]
    if len(strings) == 1 and any(len(names) == 1 for names in task.text):
        return (strings[0],)
    wanted = " or ".join("+".join(names) for names in task.text)
    raise DataError(
        f"task {task.name} looks for the text columns {wanted}, but {rows.source} has {list(rows.names)}; "
        "name them with --text-columns"
    )


def find_label_column(rows: Rows, task: Task, given: str | None = None) -> str | None:
    """The name of the label column, or None."""
    if given is not None:
        rows.column(given)  # raises if it is missing
        return given
    return next((name for name in task.label if name in rows.names), None)


def require_label_column(rows: Rows, task: Task, given: str | None = None) -> str:
    """Like `find_label_column`, but raises if there is none."""
    name = find_label_column(rows, task, given)
    if name is None:
        raise DataError(
            f"task {task.name} looks for its labels in a column {' or '.join(task.label)}, but {rows.source} has "
            f"{list(rows.names)}; name it with --label-column"
        )
    return name


def read_texts(rows: Rows, name: str) -> list[str]:
    """The strings of one column."""
    values = rows.column(name)
    for number, value in enumerate(values, start=1):
        if not isinstance(value, str):
            raise DataError(
                f"row {number} of column {name!r} of {rows.source} holds {shown(value)}; texts must be strings"
            )
    return list(values)


def read_scores(rows: Rows, name: str) -> NDArray[np.float32]:
    """The real-valued labels of one column."""
    scores = np.array([_number(value, number, name, rows) for number, value in enumerate(rows.column(name), start=1)])
    return scores.astype(np.float32)


def read_classes(rows: Rows, name: str, task: Task, config: PretrainedConfig) -> NDArray[np.int64]:
    """The labels of one column as class indices of the model's head."""
    values = rows.column(name)
    if "" in values:
        raise DataError(f"row {values.index('') + 1} of column {name!r} of {rows.source} is empty; leave such rows out")
    indices = _indices(values, name, rows, task, config)
    _check_range(indices, name, rows, config)
    return indices


def read_tags(rows: Rows, name: str, task: Task, config: PretrainedConfig) -> list[NDArray[np.int64]]:
    """One class index per word; -100 marks a word without a label."""
    values = rows.column(name)
    for number, tags in enumerate(values, start=1):
        if not isinstance(tags, (list, tuple)):
            raise DataError(
                f"row {number} of column {name!r} of {rows.source} holds {shown(tags)}; give one tag per word"
            )
    flat = _indices([tag for tags in values for tag in tags], name, rows, task, config)
    _check_range(flat[flat != IGNORED], name, rows, config)
    ends = np.cumsum([len(tags) for tags in values])
    return np.split(flat, ends[:-1])


def _indices(values: Sequence[Any], name: str, rows: Rows, task: Task, config: PretrainedConfig) -> NDArray[np.int64]:
    """Map class names by `label2id`; integers are kept."""
    strings = sum(isinstance(value, str) for value in values)
    if 0 < strings < len(values):
        raise DataError(
            f"column {name!r} of {rows.source} mixes {strings} strings with {len(values) - strings} other labels; "
            "use class names or integers throughout"
        )
    if strings and not _all_whole(set(values), config):
        return _named(values, name, rows, task, config)
    numbers = [_number(value, number, name, rows) for number, value in enumerate(values, start=1)]
    odd = next((number for number in numbers if not number.is_integer()), None)
    if odd is not None:
        raise DataError(f"column {name!r} of {rows.source} holds {odd}; class labels are whole numbers or names")
    return _in_order_of_model(np.array(numbers, dtype=np.int64), task, config)


def _all_whole(values: set[str], config: PretrainedConfig) -> bool:
    """Whether texts are indices; `1.0` may be a name of the model's own instead."""
    return all(WHOLE.fullmatch(value.strip()) and (value not in config.label2id or value.isdigit()) for value in values)


def _named(values: Sequence[str], name: str, rows: Rows, task: Task, config: PretrainedConfig) -> NDArray[np.int64]:
    """Look names up among the model's labels, exactly and then ignoring case, then among the task's."""
    by_task = {class_name: index for index, class_name in enumerate(task.classes)}
    folded = {label.lower(): index for label, index in config.label2id.items()}
    known = by_task | folded | config.label2id
    found = {value: known.get(value, known.get(value.lower())) for value in set(values)}
    unknown = sorted(value for value, index in found.items() if index is None)
    if unknown:
        names = list(config.label2id) + [class_name for class_name in by_task if class_name not in folded]
        raise DataError(
            f"column {name!r} of {rows.source} holds the label {unknown[0]!r}, the known labels are {names}; "
            "map the labels to these names or to their indices"
        )
    return np.array([found[value] for value in values], dtype=np.int64)


def _in_order_of_model(indices: NDArray[np.int64], task: Task, config: PretrainedConfig) -> NDArray[np.int64]:
    """Renumber the integer labels of a named task if the model has the same class names in another order."""
    by_name = {label.lower(): index for label, index in config.label2id.items()}
    if not task.classes or set(by_name) != set(task.classes):
        return indices
    order = np.array([by_name[class_name] for class_name in task.classes])
    if (order == np.arange(len(order))).all() or indices.min() < 0 or indices.max() >= len(order):
        return indices
    _log.info("labels of %s renumbered to the order of the model: %s", task.name, config.label2id)
    return order[indices]


def _check_range(indices: NDArray[np.int64], name: str, rows: Rows, config: PretrainedConfig) -> None:
    outside = np.unique(indices[(indices < 0) | (indices >= config.num_labels)])
    if len(outside):
        raise DataError(
            f"column {name!r} of {rows.source} holds the labels {outside[:5].tolist()}, but the head of the model has "
            f"{config.num_labels} outputs (0 to {config.num_labels - 1}); give the data or the model of this task"
        )


def _number(value: Any, number: int, name: str, rows: Rows) -> float:
    try:
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not math.isfinite(result):
        raise DataError(
            f"row {number} of column {name!r} of {rows.source} holds {shown(value)}; a label must be a number"
        )
    return result
