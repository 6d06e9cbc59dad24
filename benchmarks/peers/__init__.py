"""The peers as programs: each streams objects in order into FIFOs, as well as its library lets it."""
