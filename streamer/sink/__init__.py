"""Where the bytes go: FIFOs with their epochs, or standard output.

A sink pulls from whatever is `outlet.Drainable` into a descriptor that it alone owns; it knows nothing
of S3, windows or retries.
"""
