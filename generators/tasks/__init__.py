"""Tasks: each gives train and test tensors. SOURCES names, per task, the settings that its data can have."""

from generators.tasks.ag_news import AGNewsSource
from generators.tasks.mnist import MNISTSource

SOURCES = {"mnist": MNISTSource, "ag_news": AGNewsSource}
"""Task -> frozen dataclass of settings with a method load(data_dir) -> TaskData."""
