"""Penstock's HTTP/1.1 client: connections, TLS, connection pool, polling, response headers, bodies."""
