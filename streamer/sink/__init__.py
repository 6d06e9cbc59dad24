"""Writes streams: to FIFOs, one per epoch, or to standard output.

A sink moves bytes from an `outlet.Drainable` into a descriptor that it alone owns. It does not depend on S3,
windows or retries.
"""
