"""The form of `benchmarks.chaos` with several boxes of one service, each a set of namespaces of this machine."""
