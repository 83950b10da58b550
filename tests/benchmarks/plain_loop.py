"""The usual way to train one such model: a Dataset, a DataLoader, a loop. Speed is measured against it.

Images go through torchvision's transforms; texts are padded to the longest of their batch, without a mask.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms.functional import to_pil_image

from generators.architecture import SmallTransformer
from generators.tasks import SOURCES
from generators.tasks.data import TaskData

BATCH = 128
WARM_UP_STEPS = 10


class Digits(Dataset):
    """MNIST as PIL images through the paper's transforms."""

    def __init__(self, data: TaskData) -> None:
        self.split = data.train
        self.transform = transforms.Compose(
            [
                transforms.Resize([28, 28]),
                transforms.RandomCrop(28, padding=2),
                transforms.ToTensor(),
                transforms.Normalize([0.5], [0.5]),
            ]
        )

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.transform(to_pil_image(self.split.inputs[row])), int(self.split.labels[row])


class Texts(Dataset):
    """AG News as token ids of each text's own length."""

    def __init__(self, data: TaskData) -> None:
        assert data.train.lengths is not None
        lengths = data.train.lengths.tolist()
        self.tokens = [ids[:length].long() for ids, length in zip(data.train.inputs, lengths, strict=True)]
        self.labels = data.train.labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.tokens[row], self.labels[row]


def pad(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    tokens, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(tokens), batch_first=True), torch.tensor(labels)


def load(task: str, folder: Path, **settings: Any) -> TaskData:
    """Return a task's real data, with whatever settings of its source."""
    return SOURCES[task](**settings).load(folder)


def run_steps_per_second(data: TaskData, steps: int) -> float:
    """Return run-steps per second with batch 128, Adam and dropout 0.1; the better of 0 and 2 loader workers."""
    return max(_rate(data, steps, workers) for workers in (0, 2))


def _rate(data: TaskData, steps: int, workers: int) -> float:
    model = SmallTransformer(data.task, data.word_vectors, dropout=0.1).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    loss = nn.CrossEntropyLoss()
    samples: Dataset = Digits(data) if data.task == "mnist" else Texts(data)
    collate = None if data.task == "mnist" else pad
    step, started = 0, 0.0
    while True:
        for inputs, labels in DataLoader(
            samples, BATCH, shuffle=True, drop_last=True, num_workers=workers, collate_fn=collate
        ):
            optimizer.zero_grad()
            loss(model(inputs), labels).backward()
            optimizer.step()
            step += 1
            if step == WARM_UP_STEPS:
                started = time.perf_counter()
            if step == WARM_UP_STEPS + steps:
                return steps / (time.perf_counter() - started)
