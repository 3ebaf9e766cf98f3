"""A call's status words: from the device of every rank to the host of every rank, past everything that is queued."""
import torch

from ds_zipccl.collectives import streams


class Words:
    """``data`` int32: the words on the device, where an exchange puts them. Used by one call after another.

    GPU: the exchange is queued on the group's status stream, where it waits for what the current stream was given before (the encode) and
    for nothing after it (copies, other calls, payloads); from there the words go to host memory. Who waits for them waits for nothing else.
    """

    def __init__(self, data: torch.Tensor, state):
        self.data, self.device, self._work = data, data.device, None
        self._host = data
        if data.is_cuda:
            self._stream = state.status_stream
            self._host = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
            self._encoded, self._arrived = streams.Mark(self.device), streams.Mark(self.device)
            data.record_stream(self._stream)

    def exchange(self, send, *args) -> None:
        """``send(*args)``: queues what fills ``data`` on the current stream, or returns the Work that fills it."""
        if not self.data.is_cuda:
            self._work = send(*args)
            return
        self._encoded.set()
        with streams.On(self._stream):
            self._encoded.join()
            work = send(*args)
            if work is not None:
                work.wait()
            self._host.copy_(self.data, non_blocking=True)
            self._arrived.set()

    # What work.Pending asks of status words and of the Work that brings them.

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        elif self.data.is_cuda:
            self._arrived.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed() if self._work is not None else not self.data.is_cuda or self._arrived.passed

    def tolist(self) -> list[int]:
        return self._host.tolist()
