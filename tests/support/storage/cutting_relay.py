"""A relay before a port, whose connections tests end or hold in the middle of a frame."""

import contextlib
import socket
import threading


class CuttingRelay:
    """Passes connections on to a port of 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        # Protected by `_changed`.
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._nbytes_left: int | None = None
        self._is_down = False
        self.num_cuts = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut_after(self, nbytes: int) -> None:
        """Ends all connections as soon as this many more bytes have passed."""
        with self._changed:
            self._nbytes_left = nbytes

    def cut(self, *, stay_down: bool = False) -> None:
        """Ends all connections now. `stay_down`: later ones, too."""
        with self._changed:
            self._is_down = stay_down
            self._end_all()

    def close(self) -> None:
        """Ends all."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.cut(stay_down=True)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _end_all(self) -> None:
        self.num_cuts += 1
        for pair in self._pairs:
            for each in pair:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                near.close()
                continue
            with self._changed:
                if self._is_down:
                    near.close()
                    far.close()
                    continue
                self._pairs.append((near, far))
            copies = [threading.Thread(target=self._copy, args=pair) for pair in ((near, far), (far, near))]
            for copy in copies:
                copy.start()
            closer = threading.Thread(target=self._close_after, args=(copies, near, far))
            closer.start()
            self._threads.append(closer)

    def _close_after(self, copies: list[threading.Thread], *pair: socket.socket) -> None:
        for copy in copies:
            copy.join()
        for each in pair:
            each.close()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1000):
                with self._changed:
                    if self._nbytes_left is not None:
                        part = part[: self._nbytes_left]
                        self._nbytes_left -= len(part)
                target.sendall(part)
                with self._changed:
                    if self._nbytes_left == 0:
                        self._nbytes_left = None
                        self._end_all()
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
