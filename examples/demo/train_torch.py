"""The demo in PyTorch: a linear classifier, two DataLoader workers, one epoch of a channel per loop.

Its result has the fields of `examples.demo.train.train`, which starts it.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

from examples.demo.dataset import CLASSES, DIMENSIONS, RECORD_BYTES
from examples.demo.progress import progress
from examples.demo.train import LEARNING_RATE, credentials_in, hyperparameters, storage_clients_loaded

LABEL_AT = 18
"""Offset of the label in a record of the sample data; the vector is its last bytes."""
VECTOR_BYTES = 8 * DIMENSIONS
WORKERS = 2
LONGEST_TMPDIR = 60
"""Characters. Workers pass tensors through a socket below TMPDIR, whose path may have 107 in all (unix(7));
beyond that PyTorch waits for ever."""


def train(base: str, *, epochs: int, batch_size: int) -> dict[str, Any]:
    """Train on channel `train`, evaluate on channel `eval`, and return what came of it."""
    started = time.monotonic()
    import torch

    imported = time.monotonic()
    parameters = hyperparameters(base)
    due = {name: int(parameters[f"{name}-records"]) * RECORD_BYTES for name in ("train", "eval")}
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = torch.nn.Linear(DIMENSIONS, int(parameters.get("classes", CLASSES))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    workers = WORKERS if len(tempfile.gettempdir()) <= LONGEST_TMPDIR else 0
    loader, trained = _batches(base, "train", size=batch_size, workers=workers), []
    with progress("train", epochs * due["train"]) as advance:
        for _ in range(epochs):
            trained.append(0)
            for vectors, labels in loader:  # each loop is the channel's next epoch
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(vectors.to(device)), labels.to(device)).backward()
                optimizer.step()
                trained[-1] += len(labels)
                advance(len(labels) * RECORD_BYTES)
    fitted = time.monotonic()
    right = evaluated = 0
    with progress("evaluate", due["eval"]) as advance, torch.no_grad():
        for vectors, labels in _batches(base, "eval", size=batch_size, workers=0):
            right += int((model(vectors.to(device)).argmax(1).cpu() == labels).sum())
            evaluated += len(labels)
            advance(len(labels) * RECORD_BYTES)
    return {
        "storage": credentials_in(os.environ) + storage_clients_loaded(),
        "accuracy": right / evaluated,
        "records": {"train": trained, "eval": [evaluated]},
        "seconds": {
            "import": imported - started,
            "train": fitted - imported,
            "evaluate": time.monotonic() - fitted,
        },
        "framework": f"PyTorch {torch.__version__}",
        "devices": ["GPU" if device.type == "cuda" else "CPU"],
    }


def _batches(base: str, channel: str, *, size: int, workers: int) -> Any:
    """A loader of the channel's batches of vectors and labels."""
    from torch.utils.data import DataLoader

    from streamer.readers.torch import PipeIterableDataset

    dataset = PipeIterableDataset(
        channel,
        "TFRecord",
        batch_size=size,
        decode=decode,
        pipe_dir=os.path.join(base, "input", "data"),
        config_dir=os.path.join(base, "input", "config"),
        state_dir=os.path.join(base, "pipe_state"),
    )
    return DataLoader(dataset, batch_size=None, num_workers=workers)


def decode(records: list[bytes]) -> tuple[Any, Any]:
    """Vectors and labels of a batch; runs in the workers."""
    import torch

    raw = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8).view(len(records), -1)
    return raw[:, -VECTOR_BYTES:].contiguous().view(torch.float64).float(), raw[:, LABEL_AT].long()
