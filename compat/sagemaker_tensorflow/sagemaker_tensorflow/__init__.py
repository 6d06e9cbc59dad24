"""The incumbent's module name for Penstock's `PipeModeDataset`: names, no code.

The extension's users import from here or from `sagemaker_tensorflow.pipemode`; both give the very classes of
`streamer.readers.tensorflow`, so `except PipeModeDatasetException` catches what either raises. The
constructor and its defaults are the incumbent's (contract §6.1).
"""

from sagemaker_tensorflow.pipemode import PipeModeDataset, PipeModeDatasetException

__all__ = ["PipeModeDataset", "PipeModeDatasetException"]
