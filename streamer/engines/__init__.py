"""Engine processes: other processes of this machine that send the requests and decrypt the bodies.

    parent   plan, window, budgets, retries of a lost engine, FIFOs, trailers, metrics
      │  open: the parts of a span, their order, requests at once        ▲ opened, phase, failed, ended
      ▼  pipe: a pipe's write end                (a stream socket)       │
    engine   requests, retries, TLS ─ bytes of the span, in order ─▶ pipe ─ splice ─▶ FIFO (parent)

One interpreter runs on one core. For the relay an engine process is one more transport: `EngineSource` opens
a `Body` whose bytes come from a pipe. A `Span` has many small objects, so the parent's cost is per span.

The parent reserves memory for a span before it asks for it, so the buffers of all engines together are within
the memory budget. The limits of requests and hedges hold for all engines together, since the parent's window
gives each span its share.

An engine that dies loses nothing: the parent counts the bytes that it has taken from the pipe, asks another
engine for the rest, and starts a new process. Credentials travel over the socket only.
"""
