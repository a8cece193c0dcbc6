"""What is trained on what? Datasets, the models for them, and a user's own task."""

from vestige.tasks.reading import LabelledTensors
from vestige.tasks.rows import read_columns
from vestige.tasks.task import Task, check, describe, load, names, subject

__all__ = ["LabelledTensors", "Task", "check", "describe", "load", "names", "read_columns", "subject"]
