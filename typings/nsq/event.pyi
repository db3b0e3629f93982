from typing import Any

CONNECT: str
CLOSE: str
DATA: str
ERROR: str
IDENTIFY: str
READY: str
RESPONSE: str
MESSAGE: str
HEARTBEAT: str
BACKOFF: str
CONTINUE: str
RESUME: str
REQUEUE: str
TOUCH: str
FINISH: str
AUTH: str
AUTH_RESPONSE: str
IDENTIFY_RESPONSE: str

class EventedMixin:
    def __init__(self) -> None: ...
    def on(self, name: str, callback: Any) -> None: ...
    def off(self, name: str, callback: Any) -> None: ...
    def trigger(self, name: str, *args: Any, **kwargs: Any) -> None: ...
