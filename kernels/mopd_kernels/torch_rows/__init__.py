"""Row operations in plain PyTorch: any device, float32 or float64. The CPU path."""
