"""Some messages always fail, in every way there is; they are buried in the end. Others fail once."""

import nsq
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect

failed = set()


class Burying(Reader):
    def giving_up(self, message):
        effect("buried", message.body.decode())


def handle(message):
    number = int(message.body)
    effect("tried", str(number))
    if number % 3 == 0:
        return False
    if number % 3 == 1:
        raise RuntimeError("never")
    if number not in failed:
        failed.add(number)
        message.requeue(delay=0)
    return True


Burying(
    topic=TOPIC,
    channel=CHANNEL,
    message_handler=handle,
    nsqd_tcp_addresses=NSQDS,
    max_in_flight=20,
    max_tries=2,
    requeue_delay=0,
    max_backoff_duration=0.05,
    output_buffer_timeout=25,
    **KEY,
)
nsq.run()
