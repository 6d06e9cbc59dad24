"""The peers as programs: each streams objects in order into FIFOs, as fast as its library allows."""
