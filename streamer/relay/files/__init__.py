"""Delivery into files: the stream of a plan is cut at the borders of its objects, and each becomes a file."""
