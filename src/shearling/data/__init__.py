"""Data: files and data sets -> rows of a task -> batches.

rows.py       Rows, a small table
files.py      local files -> Rows
hub.py        GLUE and SQuAD from the Hub -> Rows
tasks.py      the table of tasks
columns.py    finds and reads the text and label columns of a task
squad.py      question answering: windows, spans
retrieval.py  retrieval: queries, passages, relevance judgements
lm.py         language models: blocks of text
media.py      images and audio, through the model's processor
batches.py    padding and stacking
encoder.py    Rows -> model inputs, for each kind of task
encode.py     Rows -> a sample of batches
"""

from shearling.data.batches import Batches, Tensors
from shearling.data.encode import encode
from shearling.data.files import read_rows
from shearling.data.hub import load_task_rows
from shearling.data.rows import Rows, as_rows
from shearling.data.tasks import TASKS, Task, find_task, infer_task, task_of

__all__ = [
    "TASKS",
    "Batches",
    "Rows",
    "Task",
    "Tensors",
    "as_rows",
    "encode",
    "find_task",
    "infer_task",
    "load_task_rows",
    "read_rows",
    "task_of",
]
