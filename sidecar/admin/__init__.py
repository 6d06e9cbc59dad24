"""The admin HTTP server, its access control, and its clients (`penstock top`, `set`, `probe`)."""
