"""The splits of a dataset: by run, so that all checkpoints of a run are in one, and by a hash, so that none moves."""

import hashlib

SPLITS = ("train", "validation", "test")
SPLIT_SHARES = (0.70, 0.15, 0.15)


def split_of(run_id: str) -> str:
    """Return the split of a run: 70 % train, 15 % validation, 15 % test, by a hash of its id alone."""
    position = int.from_bytes(hashlib.sha256(f"split:{run_id}".encode()).digest()[:8], "big") / 2**64
    if position < SPLIT_SHARES[0]:
        return "train"
    return "validation" if position < SPLIT_SHARES[0] + SPLIT_SHARES[1] else "test"
