"""Work that takes longer than a message may: it is touched until it is done."""

import nsq
import tornado.gen
import tornado.ioloop
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect


async def handle(message):
    keep_alive = tornado.ioloop.PeriodicCallback(message.touch, 100)
    keep_alive.start()
    try:
        await tornado.gen.sleep(1.7)
        effect("handled", message.body.decode())
    finally:
        keep_alive.stop()
    return True


Reader(
    topic=TOPIC,
    channel=CHANNEL,
    message_handler=handle,
    nsqd_tcp_addresses=NSQDS,
    max_in_flight=20,
    msg_timeout=1.5,
    output_buffer_timeout=25,
    **KEY,
)
nsq.run()
