"""What operators see: metrics, history, the bottleneck."""
