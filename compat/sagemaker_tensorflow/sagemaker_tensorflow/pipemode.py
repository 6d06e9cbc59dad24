"""Where the incumbent defines its two classes; see the package."""

from streamer.readers.tensorflow import PipeModeDataset, PipeModeDatasetException

__all__ = ["PipeModeDataset", "PipeModeDatasetException"]
