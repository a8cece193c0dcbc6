"""What is trained on what? Datasets, the models for them, and a user's own task."""

from vestige.tasks.reading import LabelledTensors, require_public, users_of
from vestige.tasks.rows import read_columns
from vestige.tasks.subsets import Rows
from vestige.tasks.tables import bounded
from vestige.tasks.task import Task, check, describe, load, load_table, names, reinitialised, subject
from vestige.tasks.text import bag_of_words
from vestige.tasks.whole_rows import of_file, of_task, parts_of, source_of

__all__ = [
    "LabelledTensors",
    "Rows",
    "Task",
    "bag_of_words",
    "bounded",
    "check",
    "describe",
    "load",
    "load_table",
    "names",
    "of_file",
    "of_task",
    "parts_of",
    "read_columns",
    "reinitialised",
    "require_public",
    "source_of",
    "subject",
    "users_of",
]
