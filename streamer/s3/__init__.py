"""S3: sessions and credentials, listing, ranged GETs, and the mapping of foreign errors.

No other package uses botocore or aiohttp for S3. `ranges.RangeSource` is the interface between fetching bytes
and ordering and delivering them; windows, FIFOs and retries are on the other side of it.
"""
