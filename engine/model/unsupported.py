"""The error of models that cannot be trained exactly."""


class UnsupportedArchitectureError(Exception):
    """The model cannot be trained exactly block by block. The message names the model and the reason."""
