"""Is there room for a job? Asked before anything of it is written."""

from collections import defaultdict
from pathlib import Path

from windlass.actors.context import JobContext
from windlass.storage.room import require_arena_room, require_disk_room


def require_room(context: JobContext) -> None:
    """Checks the disks under the SSD directories, together where several share one, and the memory for the arena.

    Makes the SSD directories. Raises NotEnoughRoom with the bytes needed and free.
    """
    needed: dict[int, int] = defaultdict(int)
    directories: dict[int, Path] = {}
    for index, name in enumerate(context.spec.ssd_dirs):
        directory = Path(name)
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        device = directory.stat().st_dev
        needed[device] += context.geometry(index).file_nbytes
        directories.setdefault(device, directory)
    for device, directory in directories.items():
        require_disk_room("the model states", directory, needed[device])
    require_arena_room(Path(context.spec.arena_dir), context.plan.arena_nbytes)
