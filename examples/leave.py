"""The last lines of a script whose groups may be gloo's."""
import time

GLOO_LETS_GO_S = 0.5


def leave(dist):
    """Ends the process groups of ``torch.distributed`` or ``deepspeed.comm``, on all ranks together.

    A collective of gloo has returned before gloo's thread lets go of its tensors, which takes Python's lock. Python ends a thread that
    asks for it while Python itself ends (up to 3.13), and C++ answers that with an abort: "terminate called without an active exception".
    Destroying a group waits for its threads, unless something still holds the group, as DeepSpeed's engines and torch's wrappers do.
    """
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(GLOO_LETS_GO_S)
