"""Penstock's library: what is streamed (plan), from where (source), how it moves (relay), to where (sink).

It holds no command line, no Prometheus and no HTTP server; those are `sidecar`. Importing this
package or `streamer.readers` pulls nothing outside the standard library.
"""

__version__ = "0.1.0"
