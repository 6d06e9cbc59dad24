"""S3: sessions and credentials, listing, ranged GETs, and the mapping of foreign errors.

Nothing above this package sees botocore or aiohttp. `ranges.RangeSource` is the seam between how bytes
are fetched and how they are ordered and delivered; it knows nothing of windows, FIFOs or retries.
"""
