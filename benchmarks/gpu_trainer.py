"""The training job of `benchmarks.gpu`: a process with the model, which gets its runs as lines of JSON.

    DataLoader → pinned memory → one CUDA stream copies a batch to the GPU → another stream runs the step

All pinned memory that DataLoaders need is allocated before the runs, because an allocation stops the GPU.
Events on the GPU's clock mark the start and end of every step. From the end of one step to the start of the
next the GPU was idle, because its batch was missing. The host is at most two steps ahead of the GPU and waits
for it without spinning. Every record's mark is compared on the GPU.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_feeds import loader
from benchmarks.gpu_task import AHEAD, IMAGE, LOADS, MARK, RECORD, Load, Order

STEPS_AHEAD = 2
WARM_UP = 8


class Clock:
    """Marks moments on the device: by CUDA events, or by the host's clock if the host computes."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()
        return event

    def wait(self, moment: Any) -> None:
        if self._cuda:
            moment.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) / 1000 if self._cuda else end - begin)


def step_of(load: Load, device: str) -> Callable[[Any], None]:
    """Return a function that runs one training step on a batch of records."""
    if load.model:
        import torchvision

        model = getattr(torchvision.models, load.model)(num_classes=1000)
    else:
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(IMAGE, 8))
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(records: Any) -> None:
        images = (
            records[:, :IMAGE].view(-1, 3, 224, 224).to(torch.bfloat16, memory_format=torch.channels_last)
        )
        images = images / 127.5 - 1
        with torch.autocast(device, torch.bfloat16):
            if not load.train:
                with torch.inference_mode():
                    model(images)
                return
            labels = records[:, 0].long() % 8
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    if not load.train:
        model.eval()
    return step


def run(order: Order, load: Load, step: Callable[[Any], None], device: str) -> None:
    """Train on the feed's batches for `order.seconds`. Prints `begin` at the first batch."""
    clock, copying = Clock(device), torch.cuda.Stream() if device == "cuda" else None
    mark = torch.frombuffer(bytearray(MARK), dtype=torch.uint8).to(device)
    right = torch.ones((), dtype=torch.bool, device=device)
    asked = time.monotonic()
    batches = iter(loader(order, load.batch))
    batch = next(batches)
    begun = time.monotonic()
    say("begin")
    steps: list[tuple[Any, Any]] = []
    while time.monotonic() < begun + order.seconds:
        if copying is None:
            records = batch
        else:
            with torch.cuda.stream(copying):
                records = batch.to(device, non_blocking=True)
            current = torch.cuda.current_stream()
            current.wait_stream(copying)
            records.record_stream(current)
        before = clock.mark()
        step(records)
        right &= (records[:, IMAGE:] == mark).all()
        steps.append((before, clock.mark()))
        if len(steps) > STEPS_AHEAD:
            clock.wait(steps[-STEPS_AHEAD - 1][1])
        batch = next(batches)
    end = clock.mark()  # the wait for the last batch is part of the run
    clock.wait(end)
    took = clock.seconds(steps[0][0], end)
    busy = sum(clock.seconds(*each) for each in steps)
    say(
        json.dumps(
            {
                "images": len(steps) * load.batch,
                "seconds": took,
                "idle": 1 - busy / took,
                "first_batch": begun - asked,
                "right": bool(right),
            }
        )
    )
    sys.stdin.readline()  # the harness reads the clocks before the workers end


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run `gpu_trainer LOAD DEVICE WORKERS`: warm up the model, print `ready`, then do one run per line."""
    load, device, workers = LOADS[sys.argv[1]], sys.argv[2], int(sys.argv[3])
    torch.backends.cudnn.benchmark = True
    step = step_of(load, device)
    records = torch.randint(0, 256, (load.batch, RECORD), dtype=torch.uint8).to(device)
    for _ in range(WARM_UP if device == "cuda" else 1):
        step(records)
    if device == "cuda":
        torch.cuda.synchronize()
        _ = [records.cpu().pin_memory() for _ in range(AHEAD * workers + 2)]  # PyTorch reuses this memory
    del records
    say(torch.cuda.get_device_name() if device == "cuda" else "CPU")
    for line in sys.stdin:
        run(Order(**json.loads(line)), load, step, device)
        say("ended")


if __name__ == "__main__":
    main()
