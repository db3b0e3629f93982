"""Jobs that run elsewhere report back by the id of the message that started them."""

import asyncio

import nsq
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect

open_jobs = {}


def start(message):
    message.enable_async()
    open_jobs[message.id] = message
    asyncio.get_running_loop().call_later(0.01, report, message.id)


def report(job):
    message = open_jobs.pop(job)
    effect("reported", message.body.decode())
    message.finish()


Reader(
    topic=TOPIC,
    channel=CHANNEL,
    message_handler=start,
    nsqd_tcp_addresses=NSQDS,
    max_in_flight=20,
    output_buffer_timeout=25,
    **KEY,
)
nsq.run()
