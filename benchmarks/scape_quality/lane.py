"""A stream of one run's own. All that the run holds is made, used and freed in it: what memory it leaves is only taken again in order."""
import contextlib

import torch


def streams_of(device: torch.device):
    """The module with the device's streams; None where there are none."""
    return torch.cuda if device.type == "cuda" else None


class Lane:
    """On a device without streams nothing happens."""

    def __init__(self, device: torch.device):
        self._streams, self._device = streams_of(device), device
        self.stream = self._streams.Stream(device) if self._streams else None

    def within(self):
        """A context: what is queued there goes into this lane, and neither waits for what others have queued nor makes them wait."""
        return self._streams.stream(self.stream) if self.stream else contextlib.nullcontext()

    @contextlib.contextmanager
    def joined(self):
        """The same at a seam: after all that the caller's stream has queued, and before all that it queues afterwards."""
        if not self.stream:
            yield
            return
        caller = self._streams.current_stream(self._device)
        self.stream.wait_stream(caller)
        try:
            with self._streams.stream(self.stream):
                yield
        finally:
            caller.wait_stream(self.stream)

    def wait(self) -> None:
        """Until all that was queued is done."""
        if self.stream:
            self.stream.synchronize()
