"""A stand-in for a contender, which trains nothing: it reports what its second argument says."""

import sys
import time

from benchmarks.peers.peer import emit


def main(mode: str) -> None:
    """Reports two steps, the first of which is warm-up, and holds 80 MiB in the meantime."""
    print("noise of a library")
    if mode == "missing":
        emit("missing", reason="not installed")
        return
    emit("ready")
    held = bytearray(b"x") * (80 << 20)
    for index in range(2):
        if index == 1:
            emit("timed")
        time.sleep(0.3)
        emit("step", index=index, step_s=float(index + 1), loss=9.0 - index)
        if mode == "fail":
            raise ValueError("cannot open /secret/place/file.bin")
    del held
    if mode == "stop":
        return
    emit("done")
    emit("totals", values={"ssd_nbytes": [30, 20], "control_s": 0.5, "moving_s": 0.25})


if __name__ == "__main__":
    main(sys.argv[2])
