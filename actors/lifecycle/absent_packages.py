"""Hides installed packages from this process. Their import then fails like that of an absent package.

Python, transformers and Ray import some packages whenever these are installed, for features that windlass does not use.
"""

import sys
from collections.abc import Iterable

# transformers imports scipy for losses of object detection, and scikit-learn for assisted generation. They take 20 MiB
# and seconds. scikit-learn imports pandas and pyarrow, which starts a thread.
UNUSED_BY_MODELS = ("scipy", "sklearn")


def hide_packages(names: Iterable[str]) -> None:
    """Hides packages that were not imported yet."""
    for name in names:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
