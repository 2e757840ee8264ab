"""The contract of the native module and of its Python twins `_twin`, `_twin_bytes`,
`_twin_costs`, `_twin_framing`, `_twin_lanes`, `_twin_process` and `_twin_sockets`: same names, same results,
except that no lane of the twin is ever open.

Buffers of block names, addresses and lengths are one-dimensional, contiguous, of 8-byte unsigned items
(`array('Q')`, numpy uint64, or bytes whose length is a multiple of 8); token ids likewise of 4-byte items.
Anything else raises ValueError.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence

from typing_extensions import Buffer

from kvasir.native.stats import TreeStats
from kvasir.ports import router
from kvasir.ports.routing import FloatColumn, IntColumn, RateColumns

SLOTS: int
"""Owners of one group: the four media in the order of kvasir.core.kv.Medium, then PREDICTED."""
PREDICTED: int
"""The slot of what is predicted to be on the device."""

def chain_hashes(tokens: Buffer, block_size: int, root: int) -> array[int]:
    """The names of the whole blocks of `tokens`, as array('Q')."""

def cost_terms(
    counts: tuple[IntColumn, ...],
    kv_token_bytes: FloatColumn,
    rates: RateColumns,
    request: tuple[float, float, float, float],
    weights: tuple[float, float, float, float, float, float],
    *,
    whole: bool,
) -> FloatColumn:
    """The cost of a request at each place, in seconds, by the model of kvasir_router.decide.cost: a row for
    each of its TERMS, where those of `slo_s` are 0, and a last one of the prompt tokens that are neither
    cached nor fetched. Columns are those of kvasir.ports.routing.Candidates.

    `counts`: cached_tokens, tier_tokens, queued_prefill_tokens, waiting, streams, reserved_kv_tokens,
    held_tokens, kv_tokens. `request`: prompt tokens, output tokens, choices and the promised ITL in seconds.
    `weights`: of CostWeights within, steepest, streams, work and reuse, and 1 / chunk_tokens. `whole`:
    prompts may be computed where streams decode; else nothing stalls.

    Raises ValueError for columns of different lengths.
    """

def cost_pairs(
    terms: FloatColumn,
    prefills: IntColumn,
    decodes: IntColumn,
    excess_s: FloatColumn | None,
    promise: tuple[float, float, float, float],
) -> tuple[FloatColumn, FloatColumn, FloatColumn]:
    """Of each pair of a place in `prefills` and one in `decodes`, rows of the places of `terms` (cost_terms):
    the wait for the first token in seconds; what its weight adds to the cost of it, or takes off; and the
    cost. Shape prefills x decodes. `excess_s` is by how much longer the transfer of each pair takes than the
    terms say. `promise`: the promised TTFT in seconds, and of CostWeights within, steepest and work. Raises
    ValueError for a row that is none."""

CHECKSUM_SEED: int
"""The checksum of a group of no pieces."""
CHECKSUM_FACTOR: int
"""What a checksum is multiplied with before the next piece is added."""
CHECKSUM_LANES: int
"""How many weights differ; those of a longer piece begin again."""
CHECKSUM_TILE: int
"""How many weights are not products of others."""

def copy_pieces(sources: Buffer, targets: Buffer, lengths: Buffer) -> None:
    """Copy `lengths[i]` bytes from the address `sources[i]` to `targets[i]`, for every i, without Python's
    lock. Nothing of a source may be part of a target. A piece of length 0 is passed over, whatever its
    addresses. Raises ValueError, with nothing copied, when the buffers differ in length or an address is
    0."""

def checksum_pieces(addresses: Buffer, lengths: Buffer, group: int) -> array[int]:
    """One checksum for every `group` consecutive pieces of `lengths[i]` bytes at `addresses[i]`, as
    array('Q'), without Python's lock.

    All arithmetic is modulo 2**64. A piece's sum is that of its little-endian 4-byte lanes, unsigned, each
    times the weight of its place in the piece; a group's checksum is CHECKSUM_SEED, and for each piece
    times CHECKSUM_FACTOR plus the piece's sum plus 1. Weights and factor being odd, no change to one lane
    goes unseen; this finds what went wrong by chance and not what somebody forged. A piece of length 0
    has the sum 0, whatever its address.

    Raises ValueError when the buffers differ in length, `group` is 0 or does not divide their length, an
    address is 0, or a length is no multiple of 4.
    """

def checksum_weights(count: int) -> array[int]:
    """The weights of a piece's first `count` lanes, as array('Q').

    s[i] is output number i of SplitMix64 (Steele, Lea and Flood, 2014) seeded with 0, made odd. Let lane
    number i % CHECKSUM_LANES be at place p of tile t, of CHECKSUM_TILE lanes each. Its weight is s[p], from
    the second tile on times s[CHECKSUM_TILE + t - 1]."""

class ProcessRead:
    """A read of a ProcessReader. It reads on if it is forgotten."""

    def state(self) -> int:
        """Return -1 while it runs, then 0, or the number of its error (errno), with some of the targets
        written. It writes to none of them afterwards."""
    def cancel(self) -> None:
        """Read no more than about 256 KiB on each thread; then the read ends with ECANCELED, unless it has
        ended."""
    def sums(self) -> array[int]:
        """Return the checksums as array('Q'), by row and then by part. Raises ValueError unless the state is
        0."""

class ProcessReader:
    """Reads the memory of other processes of this machine and user by process_vm_readv(2), on `threads`
    threads of its own, which never take Python's lock, and sums what is read while it is in the CPU's
    cache."""

    def __init__(self, threads: int) -> None: ...
    def begin(
        self,
        process: int,
        sources: Buffer,
        targets: Buffer,
        lengths: Buffer,
        rows: int,
        parts: int,
        at_once: int,
    ) -> ProcessRead:
        """Start to read pieces of `lengths[i]` bytes at `sources[i]` in `process` to `targets[i]` here. The
        pieces are grouped by region, and each region has one for each of the `rows`. With `parts`, each piece
        is cut into that many equal parts, and the sum of a row and part is that of `checksum_pieces` over the
        regions. Up to `at_once` bytes are read in the call. Raises ValueError, with nothing read, as
        `checksum_pieces` does."""
    def close(self) -> None:
        """Cancel what is read, and return when no thread reads. Reads begun afterwards end with ECANCELED,
        if they are not read in the call."""

def send_pieces(fd: int, addresses: Buffer, lengths: Buffer) -> None:
    """Send pieces of `lengths[i]` bytes at `addresses[i]` over a connected, blocking socket, in order,
    without Python's lock. Raises OSError: what the kernel says, BlockingIOError when the socket's time limit
    passes without progress, TimeoutError when it passes twice with too little. Raises ValueError, with
    nothing sent, when the buffers differ in length or an address is 0."""

def receive_pieces(fd: int, addresses: Buffer, lengths: Buffer, rows: int, parts: int) -> array[int]:
    """The inverse, into pieces that are grouped by region as in `ProcessReader.begin`; returns their sums,
    which are taken while the bytes are in the CPU's cache. Raises OSError also when the other side closes the
    connection (ECONNRESET), and ValueError, with nothing received, as `ProcessReader.begin` does."""

class PrefixTree:
    """A path-compressed radix tree over chained block names, with owners.

    A group is one data-parallel rank of one worker; its slots are its media and its predictions.
    `capacity` bounds the (block, owner) pairs of all groups together, `predicted_capacity` those that are
    predicted; beyond the latter the oldest predictions go first, the deepest block of one prediction
    before the others.
    """

    def __init__(self, capacity: int, predicted_capacity: int) -> None: ...
    def add_group(self) -> int:
        """A small number, used again after its former group was dropped and swept. Raises OverflowError
        beyond 8,191 groups."""
    def drop_group(self, group: int) -> None:
        """The group vanishes at once from every match; O(1) whatever it held. Raises KeyError."""
    def sweep(self, budget: int) -> int:
        """Reclaim at most about `budget` pairs of dropped groups; returns how many are left."""
    def apply(self, groups: Sequence[int], log: bytes) -> int:
        """Apply a log (kvasir.core.kv.KvEventKind); `groups[rank]` is the group of each rank. Returns how
        many pairs changed. Raises ValueError for a malformed log and KeyError for an unknown group or
        rank, both without any change; OverflowError when `capacity` is reached, after a part of it."""
    def predict(self, group: int, names: Buffer, now: float) -> int:
        """`group` will hold this prefix. Returns the number of this prediction, from 1."""
    def settle(self, group: int, names: Buffer, prediction: int) -> int:
        """End a prediction: forget of these blocks what no later prediction has taken over. Returns how
        many were forgotten."""
    def expire(self, before: float) -> int:
        """Forget predictions that were last touched before that time; returns how many pairs."""
    def match(self, names: Buffer, depths: Buffer) -> int:
        """How much of a prefix each group holds. `depths` is a writable buffer of uint32 with 4 items for
        each group number up to the highest in use: item `4 * group + m` becomes the length in blocks of
        the longest prefix whose every block is held in medium m or a faster one, predictions counting as
        device. Items of groups that do not exist become 0. Returns the greatest depth. Raises ValueError
        when `depths` is too small."""
    def held(self, group: int, slot: int) -> int:
        """Blocks of one owner."""
    def export(self, group: int, rank: int, cursor: int, limit: int) -> tuple[bytes, int]:
        """Part of all that `group` reports holding, as STORED records with this rank: about `limit`
        blocks from `cursor` (0 to begin) on, and the next cursor, or -1 at the end. Changes between calls
        are allowed: a block that is held all the while is in exactly one part."""
    def stats(self) -> TreeStats: ...
    def check_integrity(self) -> None:
        """Raises AssertionError, naming what is wrong, unless every invariant holds."""

class Shadow:
    """A worker's own record of what its engine holds, fed with the engine's events.

    Engines name blocks by keys of their own, here 64 bits; the shadow gives them Kvasir's names, computed
    from their tokens. An engine may hold several copies of one block, and says so once for each: the
    block is held until as many were removed. `root_of(salt, adapter)` is where a chain begins.
    """

    def __init__(self, ranks: int, root_of: Callable[[str, str], int]) -> None: ...
    def store(
        self,
        rank: int,
        medium: int,
        parent: int | None,
        keys: Buffer,
        tokens: Buffer,
        block_size: int,
        salt: str = "",
        adapter: str = "",
    ) -> int:
        """Blocks that follow each other, after the block with the key `parent` (None: at the root).
        Returns how many were recorded: none when `parent` is unknown, for then they cannot be named.
        Raises ValueError when tokens and keys do not fit each other."""
    def remove(self, rank: int, medium: int, keys: Buffer) -> int:
        """Copies that are gone; unknown keys are ignored. Returns how many were known."""
    def clear(self, rank: int, medium: int) -> None:
        """Nothing is held on this medium of this rank."""
    def ingest(self, rank: int, payload: bytes) -> int:
        """One message of vLLM's KV event stream (msgpack of `[ts, [events], dp_rank]`, events as maps
        with `type`). Events of a KV cache group other than the first are passed over. AllBlocksCleared is
        said of the device alone: tiers outlive the engine's prefix cache.

        One type of event is our own: KvasirTierChanged, whose `log` is a log (kvasir.core.kv.KvEventKind) of
        media below the device as bytes. Its blocks have our names already and no keys, and its records
        count for the rank that is ingested, whatever rank they carry.

        Returns the number of events. Raises ValueError, with nothing recorded, when it is malformed."""
    def take_log(self) -> bytes:
        """What has changed since the last call, as a log; empty for nothing."""
    def export(self, rank: int, cursor: int, limit: int) -> tuple[bytes, int]:
        """See PrefixTree.export."""
    def held(self, rank: int, medium: int) -> int: ...
    @property
    def unnamed(self) -> int:
        """Blocks that could not be recorded, since their parents were unknown."""

def frame_piece(before: bytes, text: str, after: bytes, chunked: bool) -> bytes:
    """Return `before`, `text` as a JSON string in UTF-8, and `after`; as one chunk of an HTTP body in chunked
    coding if `chunked`. Raises UnicodeEncodeError for a lone surrogate."""

def http_chunk(data: bytes) -> bytes:
    """Return `data`, not empty, as one chunk of an HTTP body in chunked coding."""

class StreamTokens:
    """What the client has of one choice of a stream. The fast path and the ordinary path both add to it, and
    reading it changes nothing. `start` is the number of tokens that came before and are not kept."""

    def __init__(self, start: int = 0) -> None: ...
    def add(self, ids: Iterable[int], characters: int) -> None:
        """Append token ids and a number of characters."""
    @property
    def count(self) -> int:
        """The number of tokens, and the offset of the next one."""
    @property
    def characters(self) -> int: ...
    @property
    def tokens(self) -> array[int]:
        """A copy of the ids from `start` on, as array('I')."""
    def slice(self, begin: int, end: int) -> array[int]:
        """Return the ids from offset `begin` to `end`, as far as they are kept."""
    def fence(self) -> None:
        """Refuse the deltas of all lanes that were registered with these tokens before."""

class StreamGaps:
    """How many tokens of one choice were sent, and when. The fast path and the ordinary path both add to it.
    `bounds` (ascending), `counts` (one more item) and `total` (one item) are buffers ('d', 'Q', 'd') of a
    histogram of the seconds between two tokens. Raises ValueError if their lengths do not match."""

    def __init__(self, bounds: Buffer, counts: Buffer, total: Buffer) -> None: ...
    def add(self, tokens: int, now: float) -> None:
        """Count `tokens` that came at `now`; unless they are the first, observe their mean gap for each."""
    @property
    def count(self) -> int: ...
    @property
    def last_s(self) -> float | None:
        """The time of the last token; None before the first."""

class Lane:
    """The fast path of one stream to its client; see kvasir.ports.router.Lane. Base class of two kinds."""

    @property
    def open(self) -> bool: ...
    def close(self) -> None: ...

class SocketLane(Lane):
    """A lane to a client of this process.

    Each delta is sent on the socket `fd` at once: `before`, the text as a JSON string, `after`; in HTTP's
    chunked coding if `chunked`. The connection also writes to the client through the event loop; `pending()`
    returns the bytes in its buffer, and the lane sends only while that is 0. Bytes that the socket does not
    accept go to `write`. Tokens are measured in `gaps`.
    Unless `plain`, all bytes go to `write`, which encrypts them.

    The lane is open from the start, unless the kernel has no SO_COOKIE to tell this socket from a later one
    with the same descriptor. A lane whose socket was closed sends nothing."""

    def __init__(
        self,
        *,
        fd: int,
        plain: bool,
        pending: Callable[[], int],
        write: Callable[[bytes], None],
        before: bytes,
        after: bytes,
        chunked: bool,
        gaps: StreamGaps,
    ) -> None: ...

class Relay:
    """A buffer of the deltas of its lanes, for another process. Its length is in bytes; `wake` is called when
    the first delta is added to an empty buffer."""

    def __init__(self, wake: Callable[[], None]) -> None: ...
    def lane(self, request: str) -> Lane:
        """Return a lane whose deltas carry the request id `request`."""
    def take(self) -> bytes:
        """Empty the buffer and return its deltas, in order, as a SessionResponse with a StepBatch."""
    def __len__(self) -> int: ...

class Fan:
    """The open lanes of many streams, by worker and leg, without owning them. Its length is their number."""

    def add(self, worker: str, leg: str, tokens: StreamTokens, lane: router.Lane) -> None:
        """Route the plain deltas of a leg to `lane`, unless it is closed, and add them to `tokens`, whose
        `count` is the offset that each must have. Raises
        ValueError if the lane or the leg is registered already, TypeError if `lane` is not a native Lane."""
    def take(self, worker: str, frame: bytes, now: float) -> tuple[list[int] | None, bool]:
        """Send those deltas of a valid SessionResponse with a StepBatch (proto/kvasir/wire/v1) that have a
        lane. Return the positions of its other deltas, None for all of them, and whether it may have fields
        other than deltas and a load. A delta goes over the lane of its leg if it is the next in order, has
        only token ids and text, no earlier bytes are pending, and its tokens were not fenced; any other delta
        closes the lane. `write`
        must not raise; its exceptions are passed on."""
    def __len__(self) -> int: ...
