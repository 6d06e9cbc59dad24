"""Feeds emulated accelerators of MLPerf Storage from S3, by Penstock and by its peers.

__main__   the command, the runs in turns, the table
loads      the published workloads: sizes of samples, batches, computation time, utilisation
trainer    one emulated accelerator: a wait after each batch
loader     a process that reads batches for a trainer
feeds      the clients that a loader may read by
"""
