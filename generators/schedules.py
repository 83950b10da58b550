"""The learning rate of an epoch: linear warm-up, then a cosine."""

import math


def learning_rate(peak: float, epoch: int, epochs: int, warmup_epochs: int, minimum: float) -> float:
    """Return the rate of epoch `epoch` (0-based).

    peak * (epoch + 1) / warmup_epochs while epoch < warmup_epochs; then from `peak` (the first cosine epoch still has
    it) towards `minimum` along half a cosine of epochs - warmup_epochs epochs. In torch this is LinearLR with
    start_factor 1 / warmup_epochs and total_iters warmup_epochs - 1, then CosineAnnealingLR, stepped only after the
    warm-up, with T_max = epochs - warmup_epochs and eta_min = minimum.
    """
    if epoch < warmup_epochs:
        return peak * (epoch + 1) / warmup_epochs
    progress = (epoch - warmup_epochs) / (epochs - warmup_epochs)
    return minimum + (peak - minimum) * (1 + math.cos(math.pi * progress)) / 2
