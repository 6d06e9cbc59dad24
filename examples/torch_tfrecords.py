"""PyTorch on TFRecords: two DataLoader workers share one channel, and decode whole batches.

A record is a label (64-bit integer) and a vector of 32-bit floats. `decode` runs in the workers and makes two
tensors of a list of records, which is far cheaper than one tensor for each record.
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from streamer.readers.torch import PipeIterableDataset

DIMENSIONS, CLASSES, EPOCHS = 64, 4, 2
LABEL_BYTES = 8


def decode(records: list[bytes]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors and labels of a batch."""
    raw = torch.frombuffer(bytearray(b"".join(records)), dtype=torch.uint8).view(len(records), -1)
    labels = raw[:, :LABEL_BYTES].contiguous().view(torch.int64)
    return raw[:, LABEL_BYTES:].contiguous().view(torch.float32), labels[:, 0]


def batches(channel: str, *, workers: int) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    dataset = PipeIterableDataset(channel, "TFRecord", batch_size=50, decode=decode)
    return DataLoader(dataset, batch_size=None, num_workers=workers)


def main() -> None:
    torch.manual_seed(1)
    model = torch.nn.Linear(DIMENSIONS, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    train = batches("train", workers=2)
    for epoch in range(EPOCHS):
        seen = 0
        for vectors, labels in train:  # each loop reads the channel's next epoch
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(vectors), labels)
            loss.backward()
            optimizer.step()
            seen += len(labels)
        print(f"epoch {epoch}: {seen} records, loss {loss.item():.3f}")
    right = total = 0
    with torch.no_grad():
        for vectors, labels in batches("eval", workers=0):
            right += int((model(vectors).argmax(1) == labels).sum())
            total += len(labels)
    print(f"accuracy {right / total:.4f}")


if __name__ == "__main__":
    main()
