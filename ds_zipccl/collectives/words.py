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
        self.turn, self.stream_handle, self._reading = 0, None, None
        self.launch_stream = streams.current(self.device)
        self._host, self._on_gpu, self._must_fetch = data, data.is_cuda, False
        if data.is_cuda:
            self._stream = state.status_stream
            self.stream_handle = self._stream.cuda_stream
            self._host = torch.empty(data.shape, dtype=data.dtype, device="cpu", pin_memory=True)
            self._encoded, self._arrived = torch.cuda.Event(), torch.cuda.Event()
            data.record_stream(self._stream)

    def exchange(self, send, *args) -> None:
        """``send(self, *args)`` queues what fills ``data``, or what a mailbox brings (transport.SideChannel)."""
        self.turn, self._reading = self.turn + 1, None
        if self._on_gpu:
            self._encoded.record(streams.as_object(self.device, streams.current(self.device)))
            self._stream.wait_event(self._encoded)
            self._must_fetch = True
        send(self, *args)

    def after_encode(self) -> None:
        """The current stream waits for what was queued before ``exchange``."""
        if self._on_gpu:
            streams.as_object(self.device, streams.current(self.device)).wait_event(self._encoded)

    def fetch(self) -> None:
        """Queues their way to the host, after ``exchange``: apart, since payloads wait for what is done before."""
        if not self._on_gpu or self._reading is not None:
            return
        if self._must_fetch:
            with streams.On(self._stream):
                self._host.copy_(self.data, non_blocking=True)
        self._arrived.record(self._stream)

    # What senders use.

    def through(self, queue) -> None:
        """``queue()`` queues on the current stream what fills ``data``, or returns the Work that does."""
        with streams.On(self._stream if self._on_gpu else None):
            self._work = queue()
            if self._on_gpu and self._work is not None:
                self._work.wait()
                self._work = None

    def on_host(self) -> int:
        """The address of pinned memory for a sender that puts the words there himself."""
        self._must_fetch = False
        return self._host.data_ptr()

    def posted(self, reading, address: int, stamp: int) -> tuple[int, int]:
        """In place of an ``exchange``: a mailbox.Reading brings the words, once who encodes has put this rank's at the address."""
        self.turn, self._reading = self.turn + 1, reading
        return address, stamp

    def at_once(self) -> list[int] | None:
        """The words, if a look at the mailbox is enough."""
        reading = self._reading
        return reading.words if reading is not None and reading.is_there() else None

    def by_mailbox(self, reading) -> None:
        """A mailbox.Reading brings the words; ``data`` stays as it is."""
        self._reading = reading

    # What work.Pending asks of status words and of the Work that brings them.

    def wait(self) -> None:
        if self._reading is not None:
            self._reading.wait()
        elif self._on_gpu:
            self._arrived.synchronize()
        elif self._work is not None:
            self._work.wait()

    def is_completed(self) -> bool:
        if self._reading is not None:
            return self._reading.is_there()
        if self._on_gpu:
            return self._arrived.query()
        return self._work is None or self._work.is_completed()

    def tolist(self) -> list[int]:
        return self._host.tolist() if self._reading is None else self._reading.words
