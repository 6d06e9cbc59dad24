"""Fetches parts into their stages: request, retry, resume, and a second request for a late part."""
