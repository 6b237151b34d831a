"""The benchmark of the link between boxes."""
