"""Builds the bytes of requests: Signature Version 4, and the headers of a GET or a HEAD."""
