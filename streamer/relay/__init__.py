"""Moves bytes from a source to a sink, in order, within a memory budget.

    plan ──parts──▶ Window ──admitted──▶ PartFetch ──body──▶ Stage ──delivery──▶ outlet ──▶ reader
                      ▲                                                 │
                      └──────── reserved bytes, requests ◀──────────────┘

`Window` (pure) decides which part may be requested next. `Prefetcher` is its async shell: a task for each
part in flight, a stage for each admitted part. `Delivery` is one coroutine that moves staged bytes to the
outlet. `Channel` runs epoch after epoch on FIFOs; `once` runs one epoch on standard output.

Who may block whom: the reader blocks the FIFO; a full FIFO stops delivery; undelivered bytes use up the
quota; a used-up quota admits no further part. No queue is unbounded: memory in use is at most the budget,
plus what the sockets' own buffers hold.
"""
