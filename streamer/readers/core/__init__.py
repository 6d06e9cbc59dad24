"""One epoch's FIFO and one channel in plain Python; the other readers build on these modules."""
