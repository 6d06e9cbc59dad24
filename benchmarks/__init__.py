"""Compares Penstock with its peers: one command, the same origin and the same reader for every client."""
