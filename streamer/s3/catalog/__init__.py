"""Which objects exist: listings, manifests, the size and ETag of single objects."""
