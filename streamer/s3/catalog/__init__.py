"""Finds the objects of a channel: listings, manifests, size and ETag of single objects."""
