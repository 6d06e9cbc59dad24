"""The demo: a sample data set, an embedded S3 server, a sidecar and a Keras trainer, end to end."""
