"""Two PyTorch ranks train by DDP and evaluate: each record counts once, and both ranks make equal steps.

Run by torchrun. The ranks share both channels by record. The last global batch of `eval` is filled with
padding, the last records of a rank's epoch, which the accuracy leaves out.
"""

from __future__ import annotations

import torch
import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from examples.torch_tfrecords import CLASSES, DIMENSIONS, LABEL_BYTES, decode
from streamer.readers import rank_channels
from streamer.readers.torch import PipeIterableDataset

BATCH = 25
"""Records of a rank in a step, as in the job file."""
RECORD_FORMAT = f"fixed:{LABEL_BYTES + 4 * DIMENSIONS}"


def batches(channel: str, *, padding: bool = False) -> DataLoader[tuple[torch.Tensor, torch.Tensor]]:
    dataset = PipeIterableDataset(
        rank_channels(channel), RECORD_FORMAT, batch_size=BATCH, decode=decode, padding=padding
    )
    return DataLoader(dataset, batch_size=None)


def main() -> None:
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(DIMENSIONS, CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for vectors, labels in batches("train"):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(vectors), labels).backward()
        optimizer.step()
    sums = torch.zeros(3)  # right, all, padding
    evaluation = batches("eval", padding=True)
    with torch.no_grad():
        for (vectors, labels), padding in evaluation:
            right = model(vectors).argmax(1) == labels  # of every batch, so that all ranks make equal steps
            count = len(labels) - padding
            sums += torch.tensor([right[:count].sum(), count, padding])
    torch.distributed.all_reduce(sums)
    if torch.distributed.get_rank() == 0:
        right, counted, padding = map(int, sums)
        print(f"{len(evaluation)} steps on each rank, {counted} records and {padding} of padding")
        print(f"accuracy {right / counted:.4f}")
    torch.distributed.barrier()  # meanwhile Gloo releases the last tensor, which needs the interpreter
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
