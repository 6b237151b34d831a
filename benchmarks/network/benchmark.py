"""Measures the link between boxes beside other ways to move bytes: `python -m benchmarks.network [--quick]`"""


def main() -> None:
    """Runs all contenders and prints the report."""
    raise NotImplementedError
