"""Futures of zipped calls: a thread per group completes them, since somebody has to wait for status words and decode."""
import queue
import threading

import torch


class Completer:
    """Starts its thread with the first future. Torch's DDP asks for one per bucket and goes on with its backward pass."""

    def __init__(self, device: torch.device):
        self._device = device
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def future(self, work, value: list[torch.Tensor]) -> torch.futures.Future:
        """A future that gets ``value`` when ``work.wait()`` has returned, or what it raised."""
        future = torch.futures.Future(devices=[self._device] if self._device.type == "cuda" else None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zipccl futures", daemon=True)
            self._thread.start()
        self._queue.put((work, value, future))
        return future

    def _run(self) -> None:
        stream = None
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):         # set_result marks the point on this stream that waiters join
            while (item := self._queue.get()) is not None:
                work, value, future = item
                try:
                    work.wait()
                    future.set_result(value)
                except BaseException as error:
                    future.set_exception(error)
                del item, work, value, future

    def close(self) -> None:
        """Ends the thread after the futures it has."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
