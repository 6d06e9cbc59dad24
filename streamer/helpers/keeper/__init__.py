"""The keeper: a small process that holds the FIFOs' write ends, so that a sidecar may die and be restarted.

    sidecar ──write, splice──▶ pipe ──splice, counted──▶ FIFO ──▶ reader
                                 └────────── the keeper ───┘

A FIFO ends for its reader when its last write end closes, and the kernel does not count its bytes. So the
keeper holds the write end, in a process where little can fail: no S3, no configuration, no module but these,
the standard library and `streamer.linux`. While the sidecar is dead, the stream pauses. Bytes that it had
written to the pipe still go to the reader. The next sidecar gets the number of bytes accepted: those that the
keeper has counted, plus those left in the pipe (FIONREAD), which only the keeper reads and, after the
sidecar's death, nobody writes. The next sidecar resumes at that byte, whenever the last one was killed.

    process      the socket's file, signals, limits
    server       Keeper: events become acts, requests become calls
    connection   packets of the connected sidecar      held_fifos   channels; FIFOs opened, adopted, ended
                                                       pump         bytes of open FIFOs
    loop         epoll, and acts that are repeated     channel      state of a channel; a thread in open(2)
    protocol     messages, which the sidecar shares

One thread runs everything with epoll. Each channel that waits for its reader has one more thread, because
open(2) of a FIFO blocks until a reader opens it (contract §1.7-1). The keeper serves one sidecar at a time.
It accepts the next when the last has closed its connection, which the kernel does after its last write.

No failure ends the process, or any FIFO but the one that failed:

- An event is only a hint. It leads to an `Act`, which checks the descriptor itself and may be repeated.
- An act that raises any exception is repeated every RETRY seconds. Its descriptors are not watched until
  then. So a shortage is retried, and a FIFO that cannot recover stays open.
- The thread and the pipe of a FIFO are created before its reader can open it. If that fails, the sidecar gets
  `failed` and repeats its request.
- Replies wait while the sidecar's socket is full, and are written with the state at the time of sending.
  Until then the keeper reads no further message of that sidecar.
- Every module is imported at the start, so the keeper survives an upgrade or removal of the installation.
"""
