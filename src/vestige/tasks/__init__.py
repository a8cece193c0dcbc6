"""What is trained on what? Datasets, the models for them, and a user's own task."""

from vestige.tasks.encode_tables import bounded
from vestige.tasks.protocol_subsets import Rows
from vestige.tasks.read_csv_jsonl_parquet import read_columns
from vestige.tasks.read_reviews import bag_of_words
from vestige.tasks.readers_common import LabelledTensors, require_public, same_rows, users_of
from vestige.tasks.rows_for_book import of_file, of_task, parts_of, source_of
from vestige.tasks.task import Task, check, describe, load, load_table, names, reinitialised, subject

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
    "same_rows",
    "source_of",
    "subject",
    "users_of",
]
