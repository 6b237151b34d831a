"""Passes connections on from another network namespace to a port of this one.

Run as a program in a box. A socket stays in the namespace in which it was made. So this process accepts connections of
the starter's namespace on an inherited listener, and connects to the box's port.
"""

import asyncio
import contextlib
import socket
import sys

_CHUNK_NBYTES = 1 << 16


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK_NBYTES):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()


async def _serve(listener: socket.socket, host: str, port: int) -> None:
    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        await asyncio.gather(_copy(reader, back), _copy(there, writer))
        for each in (back, writer):
            each.close()

    server = await asyncio.start_server(pass_on, sock=listener)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3])))
