"""Moves bytes from a source to a sink, in order, within a memory budget.

    plan ──parts──▶ Window ──admitted──▶ PartFetch ──body──▶ Stage ──delivery──▶ outlet ──▶ reader
                      ▲                                                 │
                      └──────── reserved bytes, requests ◀──────────────┘

`Window` (pure) decides which part may be requested next. `Prefetcher` is its async shell: it runs a task for
each part in flight and keeps a stage for each admitted part. `Delivery` is one coroutine that moves staged
bytes to the outlet. `Channel` runs epoch after epoch on FIFOs; `once` runs one epoch on standard output.

Who may block whom: a slow reader leaves the FIFO full; a full FIFO stops delivery; undelivered bytes use up
the channel quota; a used-up quota admits no further part. Every queue is bounded: memory in use is at most
the memory budget plus the sockets' own buffers.
"""
