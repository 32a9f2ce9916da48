"""Forward a loopback port to another machine, as `ssh -L` does: `python host_tunnel.py ADDRESS`. Prints the port and runs until
it is killed."""

import asyncio
import sys


async def pump(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()


async def main(address):
    host, _, port = address.rpartition(":")

    async def bring(reader, writer):
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))

    server = await asyncio.start_server(bring, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
