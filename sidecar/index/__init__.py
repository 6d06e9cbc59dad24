"""Record indexes: built, read, checked, learnt, stored in a file or in S3."""
