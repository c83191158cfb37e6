"""Values that pass from one segment to others: made or stored in one, read in another.

A chain of layers hands its residual stream from each segment to the next. A tied
embedding, what an encoder makes for all layers of a decoder, and the skips of a U-net
pass further.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from cfp.analysis.layout import Frame
from cfp.analysis.segments import Segment

# (segment that makes or stores, segment that reads)
Pair = tuple[int, int]


def find_passing(frame: Frame, segments: Sequence[Segment]) -> Mapping[Pair, list[int]]:
    """For each pair of segments the values that pass from the one to the other.

    An argument passes from the segment that stores it, or from the first that reads
    it, to all others that read it. Of segments of one kind that do not follow the maker
    only the nearest counts: they mostly choose alike, and then what one of them has
    resharded is there for all (compilers reshard one value to one sharding once).

    Args:
        frame: of the program.
        segments: its segments.
    """
    found: dict[Pair, list[int]] = {}
    place = {op: segment.index for segment in segments for op in segment.ops}
    for value, maker in _made(frame, segments, place):
        readers = _readers(frame, place, value)
        for reader in _nearest(segments, maker, readers):
            found.setdefault((maker, reader), []).append(value)
    return found


def _made(
    frame: Frame, segments: Sequence[Segment], place: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Values that may pass on, with the segments that they come from."""
    program = frame.program
    for segment in segments:
        for op_id in segment.ops:
            if op_id not in program.leaf_ops:
                for value in program.ops[op_id].results:
                    if program.values[value].shape:
                        yield value, segment.index
    owner = {
        position: segment.index
        for segment in segments
        for group in segment.groups
        for position in frame.groups[group].args
    }
    for position, value in enumerate(program.args):
        if not program.values[value].shape:
            continue
        readers = _readers(frame, place, value)
        if readers:
            yield value, owner.get(position, min(readers))


def _readers(frame: Frame, place: Mapping[int, int], value: int) -> set[int]:
    """Segments that read a value."""
    program = frame.program
    tops = (program.top_level(user) for user, _ in program.uses(value))
    return {place[op] for op in tops if op in place}


def _nearest(
    segments: Sequence[Segment], maker: int, readers: Iterable[int]
) -> Iterator[int]:
    """The readers that count: neighbours, and the nearest of each kind on each side."""
    seen: set[tuple[bool, int]] = set()
    for reader in sorted(readers, key=lambda index: abs(index - maker)):
        mark = reader > maker, segments[reader].kind
        if reader == maker or mark in seen:
            continue
        seen.add(mark)
        yield reader
