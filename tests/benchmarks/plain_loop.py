"""The usual way to train one such model: torchvision transforms, a DataLoader, a loop. Speed is measured against it."""

import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.transforms.functional import to_pil_image

from generators.architecture import SmallTransformer
from generators.tasks.mnist import MNISTSource

WARM_UP_STEPS = 10


class Digits(Dataset):
    """MNIST as PIL images through the paper's transforms."""

    def __init__(self, folder: Path) -> None:
        self.split = MNISTSource("idx").load(folder).train
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


def run_steps_per_second(folder: Path, steps: int) -> float:
    """Return run-steps per second with batch 128, Adam and dropout 0.1; the better of 0 and 2 loader workers."""
    return max(_rate(Digits(folder), steps, workers) for workers in (0, 2))


def _rate(digits: Digits, steps: int, workers: int) -> float:
    model = SmallTransformer("mnist", dropout=0.1).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    loss = nn.CrossEntropyLoss()
    started = 0.0
    for step, (images, labels) in enumerate(
        DataLoader(digits, 128, shuffle=True, drop_last=True, num_workers=workers), 1
    ):
        optimizer.zero_grad()
        loss(model(images), labels).backward()
        optimizer.step()
        if step == WARM_UP_STEPS:
            started = time.perf_counter()
        if step == WARM_UP_STEPS + steps:
            break
    return steps / (time.perf_counter() - started)
