"""Processes that Penstock starts: how they are started, the keeper, and the sidecar's connection to it."""
