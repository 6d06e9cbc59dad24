"""A process that reads batches for a trainer: `python -m benchmarks.mlperf.loader ORDER INDEX`.

Loader I of N reads the batches I, I + N, I + 2N and so on. It prints `ready`, then for each line on its
standard input the number of bytes of its next batch, once every sample of the batch has been in memory.
"""

from __future__ import annotations

import json
import sys

from benchmarks.mlperf.feeds import FEEDS, Order


def main() -> None:
    path, index = sys.argv[1], int(sys.argv[2])
    with open(path, encoding="utf-8") as file:
        order = Order(**json.load(file))
    feed = FEEDS[order.feed](order)
    mine = iter(order.batches[index :: order.loaders])
    print("ready", flush=True)
    for _ in sys.stdin:
        print(feed.load([(order.keys[key], start, length) for key, start, length in next(mine)]), flush=True)


if __name__ == "__main__":
    main()
