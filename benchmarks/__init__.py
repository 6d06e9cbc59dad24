"""Penstock beside its peers: one command, the same origin and the same reader for all."""
