"""Is the Hugging Face hub there? Its libraries take half a minute of retries to find out that it is not."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub.constants import ENDPOINT


def hub_answers() -> bool:
    """Whether the hub's name can be resolved, or a proxy may resolve it."""
    try:
        proxies = {"http", "https", "all"} & getproxies().keys()
        return bool(proxies or socket.getaddrinfo(urlsplit(ENDPOINT).hostname, 443))
    except OSError:
        return False
