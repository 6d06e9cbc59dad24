"""Hostile S3 servers by raw socket: every field, timing and framing of a response, wrong in every way."""
