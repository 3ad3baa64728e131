"""Measurements: honest medians beside eager PyTorch, torch.compile and the physical floor."""
