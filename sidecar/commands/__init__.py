"""The commands as coroutines; `sidecar.cli` parses their arguments."""
