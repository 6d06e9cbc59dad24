"""Our HTTP/1.1 client: connections and TLS, their pool, readiness, response headers, bodies."""
