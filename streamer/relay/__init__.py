"""How bytes move from a source to a sink, in order, within a budget.

    plan ──parts──▶ Window ──admitted──▶ fetch tasks ──feed──▶ Stage ──drain──▶ outlet ──▶ reader
                      ▲                                                  │
                      └───────────── delivered: room, requests ─────────────┘

`Window` (pure) decides which part may be requested next; `Prefetcher` is its async shell: a task per
part in flight, a stage per admitted part, one delivering coroutine. `Channel` strings epochs together
on FIFOs; `cat` uses the same prefetcher on standard output.

Who may block whom: the reader blocks the pipe; a full pipe stops delivery; undelivered bytes fill the
budget; a spent budget admits no further part. Nothing else waits for anything, and no queue is without
a bound: memory in use is at most the budget plus what the sockets' own buffers hold.
"""
