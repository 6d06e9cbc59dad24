"""Exports Penstock's `PipeModeDataset` under the incumbent's module name, without code of its own.

Users of the extension import from here or from `sagemaker_tensorflow.pipemode`. Both export the same classes
as `streamer.readers.tensorflow`, so `except PipeModeDatasetException` catches the errors of either. The
constructor and its defaults are the incumbent's (contract §6.1).
"""

from sagemaker_tensorflow.pipemode import PipeModeDataset, PipeModeDatasetException

__all__ = ["PipeModeDataset", "PipeModeDatasetException"]
