"""Emulated ranks of the one-sided transport in one process, for test_symmetric.py and test_symmetric_known.py: they take turns, one step
each."""
import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from ds_zipccl.codec.format import TILE_ELEMS
from ds_zipccl.collectives.symmetric_plan import plan, words_bytes
from ds_zipccl.kernels.cuda_calls import CudaCalls
from ds_zipccl.kernels.symmetric_calls import Exchange, Place, Regather, SymmetricCalls
from tests.helpers.emulated import compile_for_host
from zipscape.op_builder.zipccl import ZIPCCL_CUDA, ZIPCCL_SYMMETRIC

BITS = {2: torch.int16, 4: torch.int32}
CARRIED = 10                                               # and so many lanes: messages are carried by kernels
NUM_SENDERS, NUM_RECEIVERS = 3, 5                          # CTAs: fewer than there are pieces
FIRST, LARGEST = TILE_ELEMS * 2, 2 * TILE_ELEMS * 2        # parts of one and two tiles of BF16
TIMEOUT_NS = 10_000_000                                    # of the emulated clock, which moves when it is read


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """(CudaCalls, SymmetricCalls) of the emulated kernels."""
    folder = tmp_path_factory.mktemp("emulated")
    with ThreadPoolExecutor(2) as pool:
        codec, symmetric = pool.map(lambda library: ctypes.CDLL(str(compile_for_host(folder, library))), (ZIPCCL_CUDA, ZIPCCL_SYMMETRIC))
    return CudaCalls(codec), SymmetricCalls(symmetric)


class Ranks:
    """``world_size`` emulated ranks with ``room`` bytes of ring each."""

    def __init__(self, libraries, world_size: int, room: int, num_lanes: int):
        self.codec, self.calls = libraries
        self.world_size, self.room, self.num_lanes = world_size, room // 128 * 128, num_lanes
        self.errors = torch.zeros(world_size, dtype=torch.int32)
        self.words_bytes = words_bytes(world_size)
        num_bytes = self.words_bytes + self.room
        self.memory = [torch.full((num_bytes + 128,), 0x5A, dtype=torch.uint8) for _ in range(world_size)]         # no overflow bit
        addresses = [-(-memory.data_ptr() // 128) * 128 for memory in self.memory]
        for memory, address in zip(self.memory, addresses, strict=True):
            memory[address - memory.data_ptr():][:self.words_bytes] = 0
        self.scratch = torch.zeros(world_size, self.calls.scratch_bytes, dtype=torch.uint8)
        self.overflows = torch.zeros(world_size, self.calls.overflows_bytes // 4, dtype=torch.int32)
        self.engines = [self.calls.open(rank, addresses, num_bytes, self.scratch[rank].data_ptr(), self.overflows[rank].data_ptr(),
                                        self.errors[rank:].data_ptr(), TIMEOUT_NS, self.codec.library.zipccl_cuda_encode)
                        for rank in range(world_size)]
        self.workspace, self.status, self.stream = torch.zeros(4096, dtype=torch.int64), torch.zeros(1, dtype=torch.int32), 0

    def plan(self, dtype, row_numel: int, same_for_all: bool):
        cut = plan(dtype, row_numel, self.world_size, same_for_all, 64, self.room, FIRST, LARGEST)
        assert cut and sum(g.numel for g in cut.geometries) == row_numel and cut.words <= self.workspace.numel()
        return cut

    def exchange(self, cut, rows: int, row_stride: int, out: int, out_stride: int, own=0, copy=(0, 0, 0), made=None) -> Exchange:
        senders, receivers = (NUM_SENDERS, NUM_RECEIVERS) if self.num_lanes > CARRIED else (0, 0)
        groups = self.num_lanes % CARRIED                  # one, or two
        return Exchange(rows, row_stride, out, out_stride, own, *copy, self.num_lanes % CARRIED, cut.num_parts, cut.parts, made, None,
                        self.status.data_ptr(), self.workspace.data_ptr(), self.stream, senders, receivers, groups)

    def run(self, calls: list[Exchange]) -> None:
        for engine, call in zip(self.engines, calls, strict=True):
            engine.start(call)
        left = list(self.engines)
        while left:
            left = [engine for engine in left if engine.step()]

    def all_gather(self, data: list[torch.Tensor], made=None) -> list[torch.Tensor]:
        n, item = data[0].numel(), data[0].element_size()
        outs = [torch.full((self.world_size, n + 1), 3, dtype=x.dtype) for x in data]      # a gap between rows
        cut = self.plan(data[0].dtype, n, True)
        self.run([self.exchange(cut, x.data_ptr(), 0, out.data_ptr(), (n + 1) * item, copy=(out[r].data_ptr(), x.data_ptr(), n * item),
                                made=made and (ctypes.c_void_p * len(made[r]))(*made[r]))
                  for r, (x, out) in enumerate(zip(data, outs, strict=True))])
        assert all(bool((out[:, n] == 3).all()) for out in outs), "nothing may be written behind a row"
        return [out[:, :n] for out in outs]

    def all_to_all(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        n, item = data[0].shape[1], data[0].element_size()
        outs = [torch.full_like(x, 3) for x in data]
        cut = self.plan(data[0].dtype, n, False)
        self.run([self.exchange(cut, x.data_ptr(), n * item, out.data_ptr(), n * item, copy=(out[r].data_ptr(), x[r].data_ptr(), n * item))
                  for r, (x, out) in enumerate(zip(data, outs, strict=True))])
        return outs

    def reduce_scatter(self, data: list[torch.Tensor]) -> list[torch.Tensor]:
        n, item = data[0].shape[1], data[0].element_size()
        outs = [torch.full_like(x[0], 3) for x in data]
        cut = self.plan(data[0].dtype, n, False)
        self.run([self.exchange(cut, x.data_ptr(), n * item, out.data_ptr(), 0, own=x[r].data_ptr())
                  for r, (x, out) in enumerate(zip(data, outs, strict=True))])
        return outs


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(BITS[a.element_size()]), b.contiguous().view(BITS[b.element_size()]))


def gaussians(seed: int, shape, dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def random_bits(seed: int, shape, dtype) -> torch.Tensor:
    """Data that does not compress: every frame overflows."""
    width = 8 * dtype.itemsize - 1
    bits = torch.randint(-(1 << width), 1 << width, shape, generator=torch.Generator().manual_seed(seed))
    return bits.to(BITS[dtype.itemsize]).view(dtype)


class InTurn:
    """The engine of one rank's SymmetricTransport: calls are carried out when all ranks have made theirs."""

    address = 0

    def __init__(self, library=None):
        self.calls, self._library = [], library

    def run(self, exchange):
        self.calls.append(exchange)

    def repeat(self, address, x, out, num_receivers):
        exchange, p = Exchange(), ctypes.c_void_p
        self._library.zipccl_symmetric_exchange_of(p(address), p(x), p(out), ctypes.c_int64(num_receivers), ctypes.byref(exchange))
        self.calls.append(exchange)
        return 0

    def gather(self, address, num_receivers, *outs):
        regather = Regather.from_address(address)
        places = (Place * regather.exchange.num_parts)()
        self._library.zipccl_symmetric_places_of(ctypes.c_void_p(address), (ctypes.c_uint64 * len(outs))(*outs), places)
        exchange = Exchange.from_buffer_copy(regather.exchange)
        exchange.places, exchange.num_receivers = places, num_receivers
        self.calls.append(exchange)
        self._kept = places
        return 0

    def is_done(self, call):
        return False

    def close(self):
        pass
