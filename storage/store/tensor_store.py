"""Stores the model states of a job on one SSD without the page cache, with a commit for each step.

It copies on write: a step's states go to extents that the last commit does not use. Until the next commit later steps
overwrite them in place. A commit has two parts. `commit` makes a step durable on this SSD, beside the commit before.
`decide` says that all SSDs of the job have it. Only then may the states of the commit before be overwritten.
"""

import heapq
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import xxhash

from windlass.storage.ids import FIRST_EPOCH, Attempt, ChunkKey, JobId, LayoutEpoch, StateKind, Step
from windlass.storage.integrity import (
    GRANULE_NBYTES,
    RECORD_NBYTES,
    StaleAttempt,
    StepNotAllowed,
    StoreCorrupt,
    StoreIoError,
    StoreMissing,
)
from windlass.storage.memory import ALIGNMENT_NBYTES
from windlass.storage.ssd import Allocation, Volume
from windlass.storage.store import format as layout
from windlass.storage.store.format import CommitRecord, StoreGeometry
from windlass.storage.store.manifest import Manifest
from windlass.storage.store.regions import StateRegion
from windlass.storage.store.scratch import Scratch, scratch_demand
from windlass.storage.store.uncommitted import UncommittedMap


def spaces_in(volume: Volume) -> dict[JobId, dict[LayoutEpoch, Allocation]]:
    """Returns the spaces of each job on an SSD, by layout epoch. While a job moves, it has those of two epochs."""
    found: dict[JobId, dict[LayoutEpoch, Allocation]] = {}
    for name, allocation in volume.allocations().items():
        job, epoch = layout.owner_of_space(name)
        found.setdefault(job, {})[epoch] = allocation
    return found


def stored_geometry(volume: Volume, job: JobId, epoch: LayoutEpoch = FIRST_EPOCH) -> StoreGeometry | None:
    """Returns the layout of a job's states of an epoch on an SSD, None if it has none there. Raises StoreCorrupt."""
    stored = _find(volume, job, epoch)
    return None if stored is None else stored[1]


def last_attempt(volume: Volume, job: JobId) -> Attempt | None:
    """Returns the newest attempt that has opened a store of a job, None without a store. Raises StoreCorrupt."""
    fences: list[Attempt] = []
    for allocation in spaces_in(volume).get(job, {}).values():
        if allocation.is_ready:
            raws = (_read(volume, allocation, offset, RECORD_NBYTES) for offset in layout.FENCE_OFFSETS)
            fences += [fence for raw in raws if (fence := layout.unpack_fence(raw, allocation.nonce)) is not None]
    return max((fence for fence in fences if fence != layout.CLOSED), default=None)


def stored_commits(volume: Volume, job: JobId, epoch: LayoutEpoch = FIRST_EPOCH) -> list[CommitRecord]:
    """Returns the journal's records of a job on an SSD, oldest first, without opening its store. Raises StoreCorrupt.

    A running attempt may append more.
    """
    found = _find(volume, job, epoch)
    return [] if found is None else _read_journal(volume, found[0])


def _find(volume: Volume, job: JobId, epoch: LayoutEpoch) -> tuple[Allocation, StoreGeometry] | None:
    allocation = volume.allocations().get(layout.space_name(job, epoch))
    if allocation is None or not allocation.is_ready:
        return None
    raw = _read(volume, allocation, layout.SUPERBLOCK_OFFSET, layout.SUPERBLOCK_NBYTES)
    return allocation, layout.unpack_superblock(raw, allocation.nonce, f"SSD {volume.path}, job {job}")


class TensorStore:
    """One job's states on one SSD, open for one attempt. Reads and writes are thread-safe."""

    def __init__(self, volume: Volume, allocation: Allocation, geometry: StoreGeometry, attempt: Attempt) -> None:
        """Internal: use `create` or `open`."""
        self.volume = volume
        self.geometry = geometry
        self.attempt = attempt
        self._allocation = allocation
        self._offsets = allocation.extent_offsets(geometry.demand)  # on the SSD, of every extent
        self._own_fences = len(layout.FENCE_OFFSETS) * layout.pack_fence(attempt, allocation.nonce)
        self._records = _read_journal(volume, allocation)  # oldest first
        self._committed: tuple[CommitRecord, Manifest] | None = None
        self._is_decided = True  # all SSDs of the job have the last commit
        self._begun = False
        self._working = UncommittedMap(geometry)  # writes since the last commit
        self._free: list[int] = []  # heap of extents
        self._failed_sync: str | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The SSD and the job, for messages."""
        return f"SSD {self.volume.path}, job {self.geometry.job}"

    # --- life cycle ---------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, volume: Volume, geometry: StoreGeometry) -> Self:
        """Reserves a job's space and opens it for the attempt of `geometry`. The caller must call `resume_from` next.

        Raises:
            InsufficientSpaceError: the SSD is too full; nothing was reserved.
            StoreExists: the job already has a store.
        """
        name = layout.space_name(geometry.job, geometry.epoch)
        found = volume.allocations().get(name)
        if found is not None and not found.is_ready:
            volume.free(name, nonce=found.nonce)  # left by a process that was killed during `create`
        allocation = volume.reserve(name, geometry.demand)
        try:
            superblock = layout.pack_superblock(geometry, allocation.nonce)
            fence = layout.pack_fence(geometry.attempt, allocation.nonce)
            records = [(layout.SUPERBLOCK_OFFSET, superblock), *((offset, fence) for offset in layout.FENCE_OFFSETS)]
            allocation = volume.set_up(allocation, records)
        except BaseException:
            volume.free(name, nonce=allocation.nonce)
            raise
        return cls(volume, allocation, geometry, geometry.attempt)

    @classmethod
    def open(cls, volume: Volume, job: JobId, attempt: Attempt, epoch: LayoutEpoch = FIRST_EPOCH) -> Self:
        """Opens a job's store for `attempt` and writes the fence, so that older attempts are refused from then on.

        The caller must call `resume_from` before any read or write. A write of an older attempt that is already in the
        kernel still completes. So open a store only when the processes of older attempts have ended.

        Raises:
            StoreMissing: the SSD holds no states of this job.
            StoreCorrupt: the store is damaged.
            StaleAttempt: a newer attempt has opened it.
        """
        found = _find(volume, job, epoch)
        if found is None:
            raise StoreMissing(f"SSD {volume.path} holds no states of job {job}, or they were never completely set up")
        allocation, geometry = found
        store = cls(volume, allocation, geometry, attempt)
        with volume.device.lock():
            if store._check_attempt() != [attempt, attempt]:
                store._write_fences(attempt)
            store._records = _read_journal(
                volume, allocation
            )  # again: an older attempt may have appended before the fence
        return store

    @classmethod
    def delete(cls, volume: Volume, job: JobId, epoch: LayoutEpoch | None = None) -> None:
        """Frees a job's space of an epoch; None: of all epochs. Does nothing if it has none.

        The fence is closed first. Otherwise a running attempt could write to space that later belongs to another job.
        """
        for found, allocation in spaces_in(volume).get(job, {}).items():
            if epoch in (None, found):
                fence = layout.pack_fence(layout.CLOSED, allocation.nonce)
                records = [(offset, fence) for offset in layout.FENCE_OFFSETS]
                volume.free(allocation.job, nonce=allocation.nonce, records=records)

    def reserve_scratch(self, slot_nbytes: int, num_slots: int) -> Scratch:
        """Reserves scratch space for this attempt and frees that of earlier ones. With 0 slots it only frees.

        Raises:
            InsufficientSpaceError: the space does not fit.
            StaleAttempt: a newer attempt has opened the store.
        """
        with self._lock:
            self._check_attempt()
            demand = scratch_demand(slot_nbytes, num_slots)
            allocation = self.volume.reserve_scratch(self._allocation.job, demand, nonce=self._allocation.nonce)
        offsets = allocation.scratch_offsets(demand)[:num_slots]
        return Scratch(self.name, slot_nbytes, offsets, check_writable=self._check_attempt)

    # --- commits ------------------------------------------------------------------------------------------------------

    def commits(self) -> list[CommitRecord]:
        """Lists the journal's records, oldest first. A job resumes from the newest one that all its SSDs have."""
        return list(self._records)

    def last_commit(self) -> CommitRecord | None:
        """Returns the last commit in this attempt's history, None before the first."""
        return None if self._committed is None else self._committed[0]

    def resume_from(self, commit: CommitRecord | None) -> None:
        """Sets the commit from which this attempt continues, as any SSD of the job has it; None: from the beginning.

        The commit must be decided. Later writes and undecided commits are discarded. The call appends a record of this
        attempt, so that later commits never match a record of an older attempt.

        Raises:
            StoreCorrupt: this SSD lacks that commit, or its manifest is damaged.
        """
        with self._lock:
            self._check_attempt()
            assert not self._begun, "an attempt begins once"
            mine, committed = None, None
            if commit is not None:
                mine = next((each for each in reversed(self._records) if each.identity == commit.identity), None)
                if mine is None:
                    raise StoreCorrupt(
                        f"{self.name}: no intact record of step {commit.step} of attempt {commit.attempt}, which other "
                        "SSDs of the job have"
                    )
                step_map = self._read_manifest(mine.manifest, mine.manifest_digest, f"step {mine.step}")
                if mine.attempt != self.attempt:
                    sequence = self._sequence_of_adoption(mine)
                    mine = replace(mine, sequence=sequence, attempt=self.attempt, decided=mine.step)
                    self._append(mine)
                committed = (mine, step_map)
            self._committed = committed
            self._collect_free()
            self._begun = True

    def commit(self, step: Step, attempt: Attempt, trainer_state: str, *, states_step: Step | None = None) -> None:
        """Commits `step` as the state for a restart: syncs its data and manifest, appends a record, syncs the record.

        All writes must have returned before. Gradients are discarded. Until `decide` is called, the states of the last
        commit stay as well, and no later step may be written or committed.

        Args:
            step: the step to commit.
            attempt: the attempt of the caller.
            trainer_state: JSON of at most 3072 bytes.
            states_step: the last step that changed the states; None: `step`. If it is the last commit, no bytes are
                copied, and its states become those of `step`.

        Raises:
            StaleAttempt: a newer attempt has opened the store.
            StepNotAllowed: `step` is not later than the last commit, or that is not decided, or not all states are
                those of `states_step`.
            StoreIoError: the sync failed. Nothing can be committed until the store is opened again.
        """
        if attempt != self.attempt:
            raise StaleAttempt(f"{self.name}: open for attempt {self.attempt}; attempt {attempt} cannot commit")
        with self._lock:
            self._check_attempt()
            self._check_follows_commit(step, "commit")
            if not self.volume.device.is_present:
                raise StoreIoError(f"{self.name}: the file has vanished from its directory; nothing can be committed")
            step_map = self._map_to_commit(step, step if states_step is None else states_step)
            record = CommitRecord(
                sequence=self._next_sequence(),
                step=step,
                attempt=attempt,
                rank=self.geometry.rank,
                manifest=self._free_manifest(),
                manifest_digest=0,
                trainer_state=trainer_state,
                decided=None if self._committed is None else self._committed[0].step,
                epoch=self.geometry.epoch,
            )
            raw, digest = step_map.pack(record, self._allocation.nonce)
            self._write_synced(raw, (self.geometry.manifest_offset(record.manifest),), f"the manifest of step {step}")
            record = replace(record, manifest_digest=digest)
            self._append(record)
            # In this order, because readers without the lock must find a step's states in one of the two maps.
            self._committed = (record, step_map)
            self._working = UncommittedMap(self.geometry)
            self._is_decided = False  # so no extent of the commit before is taken yet, although all of them are free
            self._collect_free()

    def decide(self, step: Step) -> None:
        """Frees the states of the commit before `step`, because all SSDs of the job have committed `step`.

        The decision must be durable. It may come twice or late.

        Raises:
            StepNotAllowed: `step` is later than the last commit.
        """
        with self._lock:
            last = self.last_commit()
            if last is None or step > last.step:
                done = "nothing" if last is None else f"step {last.step}"
                raise StepNotAllowed(f"{self.name}: step {step} was decided, but {done} is the last commit here")
            if step == last.step:
                self._is_decided = True

    # --- transfers ----------------------------------------------------------------------------------------------------

    def regions_to_read(self, key: ChunkKey, step: Step, sizes: Sequence[tuple[StateKind, int]]) -> list[StateRegion]:
        """Returns the regions for reading bytes of each state, or of the gradient, after a check of their step.

        Raises:
            StepNotAllowed: they were never written, or may have been overwritten.
        """
        chunk = self.geometry.local_index(key)
        step_map = self._map_to_read(chunk, step)
        extent = None if step_map is None else step_map.extent(chunk)
        regions = []
        for kind, nbytes in sizes:
            written = 0 if step_map is None else step_map.nbytes(chunk, kind)
            if step_map is None or extent is None or nbytes > written:
                record = self.last_commit()
                last = "nothing" if record is None else f"step {record.step}"
                raise StepNotAllowed(
                    f"{self.name}: cannot read {nbytes} bytes of the {kind} of block {key.block}, chunk {key.chunk} as "
                    f"step {step} left it: {written} bytes of it are held, and {last} is the last commit"
                )
            if nbytes != written and nbytes % GRANULE_NBYTES:
                raise ValueError(
                    f"{nbytes} of {written} bytes end inside a checksum; read all, or whole {GRANULE_NBYTES}s"
                )
            regions.append(self._region(key, kind, step, nbytes, chunk, extent, step_map))
        return regions

    def regions_to_write(self, key: ChunkKey, step: Step, sizes: Sequence[tuple[StateKind, int]]) -> list[StateRegion]:
        """Returns the regions for writing bytes of each state, after a check that no needed data is overwritten.

        The chunk's uncommitted states or gradient of an earlier step are lost. A gradient must be requested alone, up
        to the size of the extent, because it uses the place of its step's states.

        Raises:
            StaleAttempt: a newer attempt has opened the store.
            StepNotAllowed: `step` is committed, or the last commit is not decided. Or it would overwrite a later step,
                or a gradient would overwrite states.
        """
        is_gradient = any(kind is StateKind.GRAD for kind, _ in sizes)
        if is_gradient and len(sizes) > 1:
            raise ValueError(f"{key}: a gradient lies where the states do, so both cannot be written at once")
        chunk = self.geometry.local_index(key)
        with self._lock:
            self._check_attempt()
            self._check_follows_commit(step, "write")
            self._check_follows_writes(key, chunk, step, is_gradient)
            extent = self._working.extent(chunk)
            if extent is None:
                extent = heapq.heappop(self._free)  # never empty: each chunk has two extents, and one is committed
                self._working.place(chunk, extent)
            regions = [self._region(key, kind, step, nbytes, chunk, extent, self._working) for kind, nbytes in sizes]
            self._working.begin(chunk, step, sizes)
        return regions

    # --- private ------------------------------------------------------------------------------------------------------

    def _map_to_read(self, chunk: int, step: Step) -> Manifest | None:
        # In this order, because a concurrent commit moves a step from the first map to the second.
        if (working := self._working).label(chunk) == step:
            return working
        if (committed := self._committed) is not None and committed[0].step == step:
            return committed[1]
        return None

    def _map_to_commit(self, step: Step, states_step: Step) -> Manifest:
        """Returns the map with all states of `states_step`. Raises StepNotAllowed if it is incomplete or outdated."""
        committed, working, reason = self._committed, self._working, None
        is_unchanged = committed is not None and committed[0].step == states_step
        stray = working.unlike(None if is_unchanged else states_step)
        if (newest := working.newest()) is not None and newest > step:
            reason = f"step {newest} has been begun"
        elif stray is not None and (found := working.states_step(stray)) is not None:
            reason = f"chunk {stray} of this SSD has the states of step {found}, not {states_step}"
        elif not is_unchanged and (missing := working.missing()) is not None:
            reason = f"the {missing[1]} of chunk {missing[0]} of this SSD has not been written"
        if reason is not None:
            raise StepNotAllowed(f"{self.name}: step {step} cannot be committed: {reason}")
        return committed[1] if committed is not None and is_unchanged else working

    def _region(
        self, key: ChunkKey, kind: StateKind, step: Step, nbytes: int, chunk: int, extent: int, step_map: Manifest
    ) -> StateRegion:
        is_gradient = kind is StateKind.GRAD
        full = self.geometry.extent_nbytes if is_gradient else self.geometry.region_nbytes(kind)
        if not 0 < nbytes <= full or nbytes % ALIGNMENT_NBYTES:
            raise ValueError(
                f"{nbytes} bytes cannot be the {kind} of {key}: a multiple of {ALIGNMENT_NBYTES} up to {full} is needed"
            )
        offset = self._offsets[extent] + (0 if is_gradient else self.geometry.region_offset(kind))
        return StateRegion(self.name, offset, nbytes, key, kind, step, extent, chunk, step_map)

    def _check_follows_commit(self, step: Step, verb: str) -> None:
        if not self._begun:
            raise StepNotAllowed(f"{self.name}: cannot {verb} step {step} before resume_from is called")
        last = self.last_commit()
        if last is not None and step <= last.step:
            raise StepNotAllowed(
                f"{self.name}: cannot {verb} step {step} when step {last.step} is the last commit; only later steps "
                "may change"
            )
        if last is not None and not self._is_decided:
            raise StepNotAllowed(
                f"{self.name}: cannot {verb} step {step} before step {last.step} is decided: another SSD of the job "
                "may lack that step, and then the states of the commit before it are needed"
            )

    def _check_follows_writes(self, key: ChunkKey, chunk: int, step: Step, is_gradient: bool) -> None:
        label, what = self._working.label(chunk), "gradient" if is_gradient else "states"
        if label is not None and (step < label or (is_gradient and self._working.states_step(chunk) is not None)):
            raise StepNotAllowed(
                f"{self.name}: cannot write the {what} of block {key.block}, chunk {key.chunk}, step {step}: "
                f"uncommitted data of step {label} is stored there"
            )

    def _collect_free(self) -> None:
        """Collects the extents that neither the last commit nor the writes for the next one use."""
        used = [self._working.extents()]
        if self._committed is not None:
            used.append(self._committed[1].extents())
        self._free = sorted(set(range(len(self._offsets))).difference(*used))  # sorted is a heap

    def _check_attempt(self) -> list[Attempt]:
        """Returns the attempts of the fences. Raises StaleAttempt if they or the journal have a newer attempt."""
        nbytes = len(layout.FENCE_OFFSETS) * RECORD_NBYTES
        raw = _read(self.volume, self._allocation, layout.FENCE_OFFSETS[0], nbytes)
        if raw == self._own_fences:  # a fast path without a checksum, because this runs before every write
            fences = [self.attempt, self.attempt]
        else:
            nonce, parts = self._allocation.nonce, (raw[:RECORD_NBYTES], raw[RECORD_NBYTES:])
            fences = [fence for part in parts if (fence := layout.unpack_fence(part, nonce)) is not None]
        if not fences:
            raise StaleAttempt(
                f"{self.name}: both fence records are damaged, or the job was deleted and its space belongs to another "
                f"job; attempt {self.attempt} may not change it"
            )
        if max(fences) == layout.CLOSED:
            raise StaleAttempt(f"{self.name}: the job was deleted; attempt {self.attempt} may not change it")
        seen = max([*fences, *(record.attempt for record in self._records[-1:])])
        if seen > self.attempt:
            raise StaleAttempt(f"{self.name}: attempt {seen} has taken over; attempt {self.attempt} may not change it")
        return fences

    def _write_fences(self, attempt: Attempt) -> None:
        raw, nonce = layout.pack_fence(attempt, self._allocation.nonce), self._allocation.nonce
        known = {
            offset: layout.unpack_fence(_read(self.volume, self._allocation, offset, RECORD_NBYTES), nonce)
            for offset in layout.FENCE_OFFSETS
        }
        # One after the other, the damaged or older one first, so that a torn write leaves an intact one.
        for offset in sorted(known, key=lambda offset: known[offset] or 0):
            self._write_synced(raw, (offset,), "the fence")

    def _read_manifest(self, manifest: int, digest: int, what: str) -> Manifest:
        offset = self.geometry.manifest_offset(manifest)
        raw = _read(self.volume, self._allocation, offset, self.geometry.manifest_nbytes)
        if xxhash.xxh3_64_intdigest(raw) != digest:
            raise StoreCorrupt(
                f"{self.name}: the manifest of {what} is damaged (its checksum is wrong); these states cannot be used"
            )
        return Manifest.unpack(raw, self.geometry)

    def _next_sequence(self) -> int:
        return self._records[-1].sequence + 1 if self._records else 0

    def _sequence_of_adoption(self, mine: CommitRecord) -> int:
        """Returns the number of the entry by which this attempt adopts the commit of `mine`.

        An adoption that is newer than `mine` is void, because another SSD lacks it. It is replaced, so that attempts
        which fail at their start do not fill the journal.
        """
        newest = self._records[-1]
        is_void = newest.sequence > mine.sequence and newest.manifest_digest == mine.manifest_digest
        return newest.sequence if is_void else self._next_sequence()

    def _free_manifest(self) -> int:
        # The manifest of the previous record stays too, because another SSD may lack the last commit.
        used = {record.manifest for record in self._records[-2:]}
        if self._committed is not None:
            used.add(self._committed[0].manifest)
        return next(manifest for manifest in range(layout.NUM_MANIFESTS) if manifest not in used)

    def _append(self, record: CommitRecord) -> None:
        raw = layout.pack_commit(record, self._allocation.nonce)
        place = record.sequence % layout.NUM_COMMIT_RECORDS * RECORD_NBYTES
        offsets = [journal + place for journal in layout.JOURNAL_OFFSETS]
        self._write_synced(raw, offsets, f"the commit of step {record.step}")
        older = [each for each in self._records if each.sequence < record.sequence]
        self._records = [*older[-(layout.NUM_COMMIT_RECORDS - 1) :], record]

    def _write_synced(self, raw: bytes, offsets: Sequence[int], what: str) -> None:
        if self._failed_sync is not None:
            raise StoreIoError(f"{self.name}: an earlier sync failed ({self._failed_sync}); nothing can be committed")
        try:
            for offset in offsets:
                self.volume.device.write_records(self._allocation.head_offset + offset, raw)
            self.volume.device.sync()
        except OSError as error:
            # Never retry: the kernel reports a lost write only once, and the next sync would succeed.
            self._failed_sync = str(error)
            raise StoreIoError(f"{self.name}: could not sync {what}: {error}; check the disk") from error


def _read(volume: Volume, allocation: Allocation, offset: int, nbytes: int) -> bytes:
    """Reads bytes of a job's head."""
    try:
        return volume.device.read_records(allocation.head_offset + offset, nbytes)
    except OSError as error:
        raise StoreIoError(
            f"SSD {volume.path}, job {allocation.job}: could not read its records: {error}; check the disk"
        ) from error


def _read_journal(volume: Volume, allocation: Allocation) -> list[CommitRecord]:
    nbytes = layout.NUM_COMMIT_RECORDS * RECORD_NBYTES
    copies = [_read(volume, allocation, offset, nbytes) for offset in layout.JOURNAL_OFFSETS]
    return layout.unpack_journals(copies, allocation.nonce, f"SSD {volume.path}, job {allocation.job}")
