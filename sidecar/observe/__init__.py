"""Figures for operators: metrics, the history of the last minute, the bottleneck."""
