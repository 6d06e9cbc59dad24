"""Uploads a directory to S3: `tree` finds its files, `uploads` writes each whole or not at all."""
