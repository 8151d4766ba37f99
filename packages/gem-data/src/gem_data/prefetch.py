"""One background thread that runs an iterator ahead of its consumer, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator
from typing import TypeVar

Item = TypeVar("Item")

_POLL_S = 0.1  # how soon a waiting thread notices that its consumer has left


class _End:
    """Ends the queue, with the exception that ended the iterator, if one did."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def prefetched(items: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    """The same items in the same order, at most `depth` of them ready ahead; 0 iterates in the caller's thread.

    An exception of `items` is raised where its item would have come. Closing the generator ends the thread.
    """
    if depth == 0:
        yield from items
        return
    ready: queue.Queue[Item | _End] = queue.Queue(maxsize=depth)
    left = threading.Event()
    thread = threading.Thread(target=_fill, args=(items, ready, left), name="gem-data-prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error is not None:
            raise item.error
    finally:
        left.set()
        thread.join()


def _fill(items: Iterator[Item], ready: queue.Queue[Item | _End], left: threading.Event) -> None:
    def put(item: Item | _End) -> bool:
        while not left.is_set():
            try:
                ready.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False

    try:
        for item in items:
            if not put(item):
                return
        put(_End())
    except BaseException as error:
        put(_End(error))
