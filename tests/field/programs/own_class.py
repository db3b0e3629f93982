"""A subclass that is the whole program: its handler is a method of it, its attributes have names of all kinds."""

import nsq
from surroundings import CHANNEL, KEY, NSQDS, TOPIC, Reader, effect


class Worker(Reader):
    def __init__(self):
        super().__init__(
            TOPIC, CHANNEL, self.handle, nsqd_tcp_addresses=NSQDS, max_in_flight=20, output_buffer_timeout=25, **KEY
        )
        self.store = {}
        self.stats = {"handled": 0}
        self.key = "worker"
        self._closed = self._stopping = False
        self._connecting = None
        self._runner = self.run
        self.run()

    def handle(self, message):
        self.stats["handled"] += 1
        self.store[message.id] = message.body.decode()
        self._drain(message.id)
        return True

    def process_message(self, message):
        effect("processing", message.body.decode())
        return super().process_message(message)

    def _drain(self, name):
        effect("handled", self.store.pop(name))

    def run(self):
        nsq.run()


Worker()
