"""A context in which no socket may be dropped without being closed."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_socket_is_dropped() -> Iterator[None]:
    """Fails if a socket that is not closed becomes garbage meanwhile, also one in a cycle of references."""
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        yield
        gc.collect()
    assert [str(each.message) for each in caught if issubclass(each.category, ResourceWarning)] == []
