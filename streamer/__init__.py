"""Penstock's library: plans (`plan`), S3 (`s3`), the relay from S3 to FIFOs (`relay`, `sink`), and readers.

The command line, Prometheus metrics and the HTTP server are in `sidecar`. Importing this package or
`streamer.readers` loads nothing outside the standard library.
"""

__version__ = "0.1.0"
