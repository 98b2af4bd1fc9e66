"""Exits with 0 if the server of this container is well; the images' health check."""

import http.client
import os
import sys

address = os.environ["NNSIGHT_HOST"], int(os.environ["NNSIGHT_PORT"])
connection = http.client.HTTPConnection(*address, timeout=4)
try:
    connection.request("GET", "/health")
    status = connection.getresponse().status
except OSError as error:
    sys.exit(f"{address[0]}:{address[1]} does not answer: {error}")
sys.exit(None if status == 200 else f"/health answers {status}")
