"""Requests as bytes: Signature Version 4 and the headers of a GET or a HEAD."""
