"""Tasks: each gives train and test tensors. SOURCES names, per task, the settings that its data can have."""

from generators.tasks.mnist import MNISTSource

SOURCES = {"mnist": MNISTSource}
"""Task -> frozen dataclass of settings with a method load(data_dir) -> TaskData."""
