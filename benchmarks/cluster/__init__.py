"""The benchmark of the queue over several boxes."""
