"""Reader of FIFOs and channels in plain Python, on which the other readers build."""
