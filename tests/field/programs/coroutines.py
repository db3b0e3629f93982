"""Coroutine handlers of both kinds, of which some fail at first; the program has a loop of its own, and its own end."""

import asyncio
import signal

import tornado.gen
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect

seen = set()


async def handle(message):
    if int(message.body) % 2:
        return await handle_in_tornado(message)
    await asyncio.sleep(0.01)
    if int(message.body) % 10 == 4 and message.body not in seen:
        seen.add(message.body)
        effect("failed", message.body.decode())
        message.requeue(delay=0, backoff=False)
        raise RuntimeError("not yet")
    effect("handled", message.body.decode())
    return True


@tornado.gen.coroutine
def handle_in_tornado(message):
    yield tornado.gen.sleep(0.01)
    effect("handled", message.body.decode())
    raise tornado.gen.Return(True)


async def main():
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    reader = Reader(TOPIC, CHANNEL, handle, nsqd_tcp_addresses=NSQDS, max_in_flight=20, output_buffer_timeout=25, **KEY)
    await end.wait()
    reader.close()


asyncio.run(main())
