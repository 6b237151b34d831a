"""Full-parameter fine-tuning of models far larger than the GPU, on boxes people own."""

__version__ = "0.1.0"
