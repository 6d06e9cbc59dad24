"""The boundary with botocore: session, credentials, its HTTP client's limits, error mapping."""
