"""Cache of features: the outputs of the frozen layers at one cut, kept on the local disk with their labels.

A record is raw or encoded by a codec that gives every bit back (:mod:`hapi.cache.writing.record_codec`), whichever its
writer chose; it says which. Readers decode it in the thread that reads, ahead of the training. What fits a bounded part
of this process's memory is kept there too, decoded, after its checksum was verified.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from hapi.arrays import Bytes, Flags, IntArray, LabelArray
from hapi.cache.catalog import RecordLocations
from hapi.cache.disk_rates import DiskBacklog, DiskRates, RateMeter, WriterPace
from hapi.cache.feature_key import FeatureKey
from hapi.cache.folder import CacheFolder
from hapi.cache.key_file import KeyFile
from hapi.cache.memory_rows import MemoryRows
from hapi.cache.records import RecordCache
from hapi.cache.writing.put_rates import PutRates
from hapi.cache.writing.record_codec import PassTimes, RecordCodec
from hapi.closing import Closing
from hapi.codecs.choose import RAW, CodecFigures
from hapi.codecs.names import AT_REST, NONE, CacheCodec, Codec
from hapi.codecs.rows import decode_row, encode_rows
from hapi.wire.frames import DTYPE_BYTES
from hapi.wire.labels import LabelForm
from hapi.wire.references import DatasetReference
from hapi.wire.samples import Samples, offsets_of

_PART_BYTES = 16 << 20
"""Most bytes that are encoded or decoded at a time, unless one sample has more."""
_SHRUNK = 1.005
"""Least ratio of what counts as encoded."""
_PACE_STRETCHES = 4
"""Stretches of 64 MiB of which the writer's pace is the mean: threads that compete with it come and go."""
_NAME = "features"
"""Name of the versions that features are, beside those of datasets."""


class FeatureCache(Closing):
    """Cached features of one key. Thread-safe; close it after the last read."""

    def __init__(
        self,
        folder: CacheFolder,
        key: FeatureKey,
        count: int,
        form: LabelForm,
        memory_bytes: int = 0,
        made_with: str = "",
        *,
        codec: CacheCodec = "auto",
        reads: int = 1,
        lasting: bool = False,
    ) -> None:
        """Use ``folder`` for the features of ``key``.

        Args:
            folder: the cache's folder.
            key: identity of the features.
            count: samples of the dataset; ids are 0 to ``count - 1``.
            form: of the labels, which are kept with the features.
            memory_bytes: most bytes that are kept in this process's memory too.
            made_with: what computes the features that are put: the device and the smallest batch. People see it in
                ``hapi cache ls``, since the last bits may differ with it.
            codec: encoding of the features that are put.
            reads: passes in which they will be read, as far as is known.
            lasting: as in :class:`RecordCache`.

        Raises:
            HapiError: the folder cannot be used, or has features of another key under the same digest.
        """
        self.key = key
        self.sample_bytes = key.sample_bytes
        """Bytes of one sample's features."""
        self._form = form
        # Another name of the same samples is no other key.
        reference = DatasetReference(name=_NAME, version=key.digest)
        lines = (made_with,) if made_with else ()
        file = KeyFile(key.to_json(), key.dataset.name, lines)
        self._records = RecordCache(folder, reference, count, form, key=file, behind=True, lasting=lasting)
        self._memory = MemoryRows(memory_bytes, count, self.sample_bytes, form)
        self._decoding, self._putting = RateMeter(), RateMeter(stretches=_PACE_STRETCHES)
        self._put_until, self._choosing = 0.0, 0.0
        """Time of the last put's end, and seconds of all that were spent on the choice of a codec."""
        self._decoded: Codec | None = None
        """Codec of the last record that was decoded."""
        self.codec = RecordCodec(
            codec,
            DTYPE_BYTES[key.dtype],
            self.sample_bytes,
            room=self._records.room(count, float(self.sample_bytes)),
            reads=reads,
            rates=self.probed_rates,
            small_form=key.small_form,
        )
        """Codec of the features that are put."""

    @staticmethod
    def is_begun(folder: CacheFolder, key: FeatureKey) -> bool:
        """Return whether ``folder`` has a place for features of ``key``."""
        return folder.version(DatasetReference(name=_NAME, version=key.digest)).exists()

    @property
    def admits(self) -> bool:
        """True while more features can be kept, as far as is known."""
        return self._records.admits or not self._memory.full

    @property
    def trouble(self) -> str:
        """Reason why nothing more is kept, once something could not be written; else empty."""
        return self._records.trouble

    def refresh(self) -> None:
        """Take in what other processes have kept until now."""
        self._records.refresh()

    def held(self, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are cached; bool [n]."""
        held = self._memory.held(ids)
        if not held.all():
            held |= self._records.held(ids)
        return held

    def in_memory(self, ids: IntArray) -> Flags:
        """Return which of samples ``ids`` are in this process's memory, where they stay; bool [n]."""
        return self._memory.held(ids)

    def share(self, ids: IntArray) -> float:
        """Share of samples ``ids`` that is cached, from 0 to 1."""
        return float(self.held(ids).mean()) if len(ids) else 0.0

    def room(self, samples: int) -> float:
        """Share of ``samples`` for which the budget has room, from 0 to 1, by the mean size of what is kept."""
        return min(1.0, self._records.room(samples, self.stored_bytes))

    @property
    def stored_bytes(self) -> float:
        """Mean bytes of a kept sample's content on the disk; those before the codec while nothing is kept."""
        records = self._records
        return records.stored_bytes / records.samples if records.samples else float(self.sample_bytes)

    @property
    def segment_bytes(self) -> int:
        """Bytes after which a put waits for the disk."""
        return self._records.segment_bytes

    @property
    def memory_bytes(self) -> int:
        """Most bytes of this process's memory that its rows take."""
        return self._memory.nbytes

    def rates(self) -> DiskRates:
        """Return the rates of the disk, of its last 64 MiB; None for what was not measured."""
        return self._records.rates()

    def writer_pace(self) -> WriterPace:
        """Return the seconds of a put for a byte on the disk, of the last 256 MiB, and its waits of the last 64."""
        work, wait = self._putting.rate, self._records.puts.waits.rate
        return WriterPace(1 / work if work else 0.0, 1 / wait if wait else 0.0)

    def disk_backlog(self) -> DiskBacklog:
        """Return the rate at which the disk writes, as it is used or was probed, and the bytes on their way there."""
        puts = self._records.puts
        rates = (puts.at_work.rate or self._records.folder.known_rates().write, puts.at_least.rate)
        rate = max((rate for rate in rates if rate is not None), default=None)
        return DiskBacklog(rate, 0.0 if rate is None else puts.on_its_way(rate))

    def probed_rates(self) -> DiskRates:
        """Return the rates of the disk, of its last 64 MiB or of a probe; None for what could not be measured."""
        used = self.rates()
        if None not in used:
            return used
        probed = self._records.folder.probed_rates()
        return DiskRates(used.read or probed.read, used.write or probed.write)

    def read(self, ids: IntArray, features: npt.NDArray[np.uint8], labels: LabelArray) -> Flags:
        """Read the features of cached samples into their rows.

        Args:
            ids: int64 [n].
            features: bytes of the features, uint8 [n, sample_bytes], C-contiguous; rows that were not read hold
                anything.
            labels: of the dataset's form, n of them, in the same way.

        Returns:
            bool [n]: True for the rows that were read and passed their checksum.

        Raises:
            ValueError: ``features`` has another form.
        """
        if features.shape != (len(ids), self.sample_bytes) or not features.flags.c_contiguous:
            raise ValueError(f"features: expected contiguous rows of {self.sample_bytes} bytes for each id")
        found = self._memory.read(ids, features, labels)
        if found.all():
            return found
        rows = np.flatnonzero(~found)
        locations = self._records.find(ids[rows])
        raw = locations.held & (locations.length == self.sample_bytes)
        encoded = locations.held & (locations.length < self.sample_bytes)
        for kind, fill in ((raw, self._fill_raw), (encoded, self._fill_encoded)):
            places = np.flatnonzero(kind)
            if len(places):
                into = rows[places]
                found[into] = fill(ids[into], locations.of(places), into, features, labels)
        if not self._memory.full:
            came = rows[found[rows]]
            self._memory.add(ids[came], features[came], labels[came])
        return found

    def _fill_raw(
        self, ids: IntArray, locations: RecordLocations, rows: IntArray, features: Bytes, labels: LabelArray
    ) -> Flags:
        """Read raw records into their rows; True for those that are sound."""
        kept = self._form.empty(len(rows))
        flat = features.reshape(-1)
        sound = self._records.fill(ids, locations, rows * self.sample_bytes, flat, kept)
        labels[rows[sound]] = kept[sound]
        return sound

    def _fill_encoded(
        self, ids: IntArray, locations: RecordLocations, rows: IntArray, features: Bytes, labels: LabelArray
    ) -> Flags:
        """Read encoded records, a bounded number of bytes at a time, and decode them into their rows."""
        sound = np.zeros(len(ids), dtype=np.bool_)
        room = np.empty(0, dtype=np.uint8)
        for part in _parts(locations.length):
            offsets = offsets_of(locations.length[part])
            if len(room) < offsets[-1]:
                room = np.empty(int(offsets[-1]), dtype=np.uint8)
            places = np.arange(part.start, part.stop)
            kept, codecs = self._form.empty(len(places)), np.empty(len(places), dtype=np.uint8)
            spots = locations.of(places)
            read = self._records.fill(ids[part], spots, offsets[:-1], room, kept, codecs)
            whole, began = read.copy(), time.monotonic()
            for place in np.flatnonzero(read).tolist():
                stored = room[offsets[place] : offsets[place + 1]]
                row = features[rows[part.start + place]]
                whole[place] = decode_row(int(codecs[place]), stored, row, self.codec.itemsize)
            self._decoding.add(int(whole.sum()) * self.sample_bytes, time.monotonic() - began)
            if whole.any():
                self._decoded = AT_REST[codecs[whole][-1]]
            if (wrong := np.flatnonzero(read & ~whole)).size:
                self._records.drop(ids[places[wrong]], spots.of(wrong))
            labels[rows[places[whole]]] = kept[whole]
            sound[part] = whole
        return sound

    def stored_as(self) -> CodecFigures | None:
        """Return the codec of what is kept: its name and speeds as it was read or tried here, its ratio as it is.

        None while nothing is kept, or where this process has neither read nor tried it.
        """
        stored, raw = self._records.stored_bytes, self._records.samples * self.sample_bytes
        if not stored:
            return None
        if raw < _SHRUNK * stored:
            return RAW
        name = self._decoded or self.codec.name
        tried = next((figures for figures in self.codec.figures if figures.name == name), None)
        decode = self._decoding.rate or (None if tried is None else tried.decode_rate)
        if name == NONE or decode is None:
            return None
        encode = tried.encode_rate if tried else decode
        return CodecFigures(name=name, ratio=raw / stored, encode_rate=encode, decode_rate=decode)

    def put(
        self,
        ids: IntArray,
        features: npt.NDArray[np.uint8],
        labels: LabelArray,
        times: PassTimes | None = None,
        offered_at: float | None = None,
    ) -> None:
        """Keep the features of samples that are new, as far as there is room. Never raises.

        It may wait for the disk: what must not wait calls it behind the training.

        Args:
            ids: int64 [n].
            features: bytes of the features, uint8 [n, sample_bytes]; copied before this returns.
            labels: of the dataset's form, n of them.
            times: of the pass that computed them, by which a codec may be chosen.
            offered_at: time since which they have waited for this put (``time.monotonic``): the writer's pace counts
                hand-overs to its thread, and waits for the interpreter; None for now.
        """
        began = time.monotonic() if offered_at is None else max(offered_at, self._put_until)
        before = self._records.puts.waited_seconds + self._choosing
        nbytes = self._put(ids, np.ascontiguousarray(features), labels, times)
        self._memory.add(ids, features, labels)
        other = self._records.puts.waited_seconds + self._choosing - before
        self._put_until = time.monotonic()
        self._putting.add(nbytes, self._put_until - began - other)

    def _put(self, ids: IntArray, rows: Bytes, labels: LabelArray, times: PassTimes | None) -> int:
        """Put rows on the disk; return their bytes as they are stored."""
        began = time.monotonic()
        codec = self.codec.at(rows, times) if self._records.admits and len(rows) else NONE
        self._choosing += time.monotonic() - began
        if codec == NONE:
            offsets = np.arange(len(ids) + 1, dtype=np.int64) * self.sample_bytes
            self._records.put(Samples(ids=ids, data=rows.reshape(-1), offsets=offsets, labels=labels))
            return rows.nbytes
        new, nbytes = np.flatnonzero(~self._records.held(ids)), 0
        for part in _parts(np.full(len(new), self.sample_bytes)):
            places = new[part]
            data, lengths, codecs = encode_rows(
                codec, [rows[place].data for place in places], self.codec.itemsize
            )
            samples = Samples(ids=ids[places], data=data, offsets=offsets_of(lengths), labels=labels[places])
            self._records.put(samples, codecs)
            nbytes += int(lengths.sum())
        return nbytes

    @property
    def puts(self) -> PutRates:
        """The rates of puts, and how far they may wait for the disk."""
        return self._records.puts

    def flush(self) -> None:
        """Make what was put available to other processes, present and future. Never raises."""
        self._records.flush()

    def close(self) -> None:
        """Flush, and give the folder back; closing twice does nothing."""
        self._records.close()


def _parts(lengths: npt.NDArray[np.integer]) -> Iterator[slice]:
    """Slices of records of these lengths, each of a bounded number of bytes."""
    ends, start = np.cumsum(lengths, dtype=np.int64), 0
    while start < len(ends):
        begin = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, begin + _PART_BYTES, side="right")))
        yield slice(start, stop)
        start = stop
