"""The native extension (csrc/). Addresses are integers that the caller keeps valid; bulk work runs without the GIL."""

from collections.abc import Sequence

def checksum(addr: int, nbytes: int, seed: int) -> int:
    """The 64-bit record checksum (`saria_vllm.engine.checksum`) of `nbytes` at `addr`, any alignment.

    Raises:
        ValueError: `nbytes` is not a multiple of 4096.
    """

def block_sum_by_all(addr: int) -> list[int]:
    """s_0 of the 4096 bytes at `addr` by every implementation that this CPU can run, each alone and with its copy; for
    tests. A copy that differs gives a wrong value."""

class PageMap:
    """Copies between records and the pages of one KV cache group.

    The page of block b in layer l is `page_bytes[l]` bytes at `bases[l] + b * strides[l]`. A record holds, for each
    block of the chunk and then for each layer, that page. Bytes between the payload and the record's padded end are
    left as they are. Every block list is checked before anything is copied: a block id of `num_blocks` or more raises
    IndexError everywhere; a negative one raises IndexError in gathers, and in scatters its pages are skipped.

    Raises:
        ValueError: lists of unequal length or without entries, a size of 0, or `num_blocks` < 1.
    """

    def __init__(
        self, bases: Sequence[int], strides: Sequence[int], page_bytes: Sequence[int], num_blocks: int
    ) -> None: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
    def gather(self, dst: int, blocks: Sequence[int]) -> None:
        """Copy the pages of `blocks` into the record at `dst`."""
    def gather_many(self, dsts: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """`gather` for several records. Raises ValueError unless there is one block list per record."""
    def scatter(self, src: int, blocks: Sequence[int]) -> None:
        """Copy the record at `src` into the pages of `blocks`."""
    def scatter_many(self, srcs: Sequence[int], blocks: Sequence[Sequence[int]]) -> None:
        """`scatter` for several records. Raises ValueError unless there is one block list per record."""
    def scatter_verify(self, src: int, nbytes: int, seed: int, blocks: Sequence[int]) -> int:
        """`scatter`, and `checksum(src, nbytes, seed)` from the same pass; skipped blocks are summed too.

        The pages are written before the sum is known: on a mismatch they hold bad bytes and must not be used.

        Raises:
            ValueError: `nbytes` is not a multiple of 4096, or less than the payload.
        """

class Uring:
    """An io_uring with at most `depth` (1..4096) transfers in flight, for one thread at a time.

    Short transfers are continued inside; a read that meets the end of the file ends with the bytes so far.

    Args:
        polled: a thread of the kernel takes what is submitted (SQPOLL).

    Raises:
        OSError: the kernel or a seccomp filter does not allow io_uring; EOPNOTSUPP where `polled` needs Linux 5.11.
    """

    def __init__(self, depth: int, polled: bool) -> None: ...
    @property
    def in_flight(self) -> int:
        """Transfers submitted and not yet returned by `reap`."""
    def register_memory(self, addr: int, nbytes: int) -> None:
        """Pin memory, once, so that transfers within it cost less; it must stay mapped until `close`.

        Raises:
            OSError: the limit of locked memory, a second call, or the ring is closed.
        """
    def register_files(self, count: int) -> None:
        """Keep the files of transfers open in the kernel from now on, `count` at most, so that transfers cost less.

        Raises:
            OSError: the limit of open files, a second call, or the ring is closed.
        """
    def forget_file(self, fd: int) -> None:
        """Let go of a descriptor that no transfer uses, before it is closed. For any thread, also after `close`."""
    def submit(self, op: int, fd: int, addr: int, nbytes: int, offset: int, tag: int) -> None:
        """Start a read (`op` 0) or write (1) of `nbytes` between `addr` and `offset` of `fd`.

        Raises:
            RuntimeError: `depth` transfers are in flight.
            OSError: the ring is closed or the kernel refuses.
        """
    def reap(self, timeout_s: float) -> list[tuple[int, int]]:
        """(tag, bytes moved or -errno) of what ended, waiting up to `timeout_s` seconds for the first one.

        May return early with nothing: at once when nothing is in flight, and after a signal.
        """
    def close(self) -> None:
        """Wait for what is in flight, then free the ring. May be called twice."""
