"""The three standard streams of a running child, moved by one `poll(2)` so that neither side can block the other."""

import os
import select

from sandbox._child import Child

_CHUNK_BYTES = 65536
_LONGEST_WAIT = 3600.0


class Sink:
    """One output stream: what was read and not yet taken, at most `limit` bytes."""

    def __init__(self, descriptor: int, limit: int) -> None:
        self.descriptor, self.limit = descriptor, limit
        self.data = bytearray()
        self.truncated = False
        self.open = True

    def pull(self) -> None:
        """Read what is there; what goes over the limit is dropped and marked."""
        try:
            chunk = os.read(self.descriptor, _CHUNK_BYTES)
        except BlockingIOError:
            return
        self.open = bool(chunk)
        room = self.limit - len(self.data)
        self.data += chunk[:room]
        self.truncated = self.truncated or len(chunk) > room

    def take(self, size: int) -> bytes:
        """Remove and return the first `size` bytes."""
        taken = bytes(self.data[:size])
        del self.data[:size]
        return taken


class Streams:
    """stdin to be fed, stdout and stderr to be collected, and the news that the child has ended."""

    def __init__(self, child: Child, output_bytes: int) -> None:
        self._child = child
        self._poll = select.poll()
        self.stdout, self.stderr = Sink(child.stdout, output_bytes), Sink(child.stderr, output_bytes)
        for descriptor in (child.stdout, child.stderr, child.exited):
            self._poll.register(descriptor, select.POLLIN)
        self._pending = memoryview(b"")
        self._feeding = False
        self._ending = False
        self.ended = False

    @property
    def drained(self) -> bool:
        """True once both outputs are at their end."""
        return not (self.stdout.open or self.stderr.open)

    @property
    def feeding(self) -> bool:
        """True while bytes wait for the child to read them."""
        return self._feeding

    def feed(self, data: bytes, *, end: bool) -> None:
        """Queue bytes for stdin; with `end`, it is closed after them."""
        self._pending, self._ending = memoryview(data), end
        if not self._feeding and self._child.stdin_open:
            self._feeding = True
            self._poll.register(self._child.stdin, select.POLLOUT)
            self._push()

    def move(self, seconds: float | None) -> None:
        """Wait, at most so long, for anything to move, and move it."""
        for descriptor, _ in self._poll.poll(None if seconds is None else max(0.0, min(seconds, _LONGEST_WAIT)) * 1000):
            if descriptor == self._child.exited:
                self._poll.unregister(descriptor)
                self.ended = True
            elif descriptor == self._child.stdin and self._feeding:
                self._push()
            else:
                self._pull(self.stdout if descriptor == self.stdout.descriptor else self.stderr)

    def _pull(self, sink: Sink) -> None:
        sink.pull()
        if not sink.open:
            self._poll.unregister(sink.descriptor)

    def _push(self) -> None:
        try:
            written = os.write(self._child.stdin, self._pending[:_CHUNK_BYTES]) if self._pending else 0
        except BlockingIOError:
            return
        except BrokenPipeError:
            written = len(self._pending)  # nobody reads it any more
        self._pending = self._pending[written:]
        if not self._pending:
            self._feeding = False
            self._poll.unregister(self._child.stdin)
            if self._ending:
                self._child.close_stdin()
