"""Finds the objects of a channel: pages of listings, size and ETag of single objects."""
