"""Job files: documents, validation, the frozen `Job`."""
