"""Exports the two classes that the incumbent defines in this module; see the package."""

from streamer.readers.tensorflow import PipeModeDataset, PipeModeDatasetException

__all__ = ["PipeModeDataset", "PipeModeDatasetException"]
