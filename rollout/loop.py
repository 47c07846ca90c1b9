"""One event loop in one thread, on which a policy answers the calls of all the threads that play."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Self


class BackgroundLoop:
    """An event loop in a daemon thread; use in a `with` block."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="policy-loop", daemon=True)
        self._thread.start()
        self.stop: asyncio.Event = self.submit(_new_event()).result()
        """Given to every call of the policy; set it by `request_stop`."""

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Start a coroutine from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def request_stop(self) -> None:
        """Ask every call of the policy, now and later, to return soon."""
        self._loop.call_soon_threadsafe(self.stop.set)

    def close(self) -> None:
        """End the loop and its thread; idempotent."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        pending = asyncio.all_tasks(self._loop)
        for task in pending:
            task.cancel()
        if pending:
            self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def _new_event() -> asyncio.Event:
    return asyncio.Event()
