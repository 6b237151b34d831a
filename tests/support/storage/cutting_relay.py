"""A relay before a port, whose connections tests end in the middle of a frame, and whose bytes they damage."""

import contextlib
import socket
import threading

_WAIT_S = 20.0
_TLS_RECORD = 0x16  # the first byte of each TLS handshake


class CuttingRelay:
    """Passes connections on to a port of 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        # Protected by `_changed`.
        self._open: set[socket.socket] = set()
        self._nbytes_left: int | None = None
        self._damage_nbytes: int | None = None
        self._nbytes_to_damage = 0
        self._is_down = False
        self.num_cuts = 0
        self.num_damaged = 0
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def cut_after(self, nbytes: int) -> None:
        """Ends all connections as soon as this many more bytes have passed."""
        with self._changed:
            self._nbytes_left = nbytes

    def await_cut(self) -> None:
        """Waits until the bytes of `cut_after` have passed."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._nbytes_left is None, _WAIT_S)

    def damage_every(self, nbytes: int) -> None:
        """Changes one of this many bytes, from now on, of the connections that are not TLS."""
        with self._changed:
            self._damage_nbytes = self._nbytes_to_damage = nbytes

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
        for thread in self._threads:  # the first one adds others until it ends
            thread.join()
        self._listener.close()

    def _end_all(self) -> None:
        self.num_cuts += 1
        self._changed.notify_all()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._relay, args=(near,))
            self._threads.append(thread)
            thread.start()

    def _relay(self, near: socket.socket) -> None:
        """Passes one connection on until it ends, and closes both of its sockets."""
        with contextlib.suppress(OSError), near, socket.create_connection(("127.0.0.1", self._port)) as far:
            with self._changed:
                if self._is_down:
                    return
                self._open |= {near, far}
            try:
                back = threading.Thread(target=self._copy, args=(far, near, True))
                back.start()
                self._copy(near, far, near.recv(1, socket.MSG_PEEK)[:1] == bytes([_TLS_RECORD]))
                back.join()
            finally:
                with self._changed:
                    self._open -= {near, far}

    def _copy(self, source: socket.socket, target: socket.socket, is_tls: bool) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1000):
                with self._changed:
                    if self._nbytes_left is not None:
                        part = part[: self._nbytes_left]
                        self._nbytes_left -= len(part)
                    if not is_tls:
                        part = self._damaged(part)
                target.sendall(part)
                with self._changed:
                    if self._nbytes_left == 0:
                        self._nbytes_left = None
                        self._end_all()
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _damaged(self, part: bytes) -> bytes:
        if self._damage_nbytes is None:
            return part
        self._nbytes_to_damage -= len(part)
        if self._nbytes_to_damage > 0:
            return part
        self._nbytes_to_damage = self._damage_nbytes
        self.num_damaged += 1
        return bytes([part[0] ^ 1]) + part[1:]
