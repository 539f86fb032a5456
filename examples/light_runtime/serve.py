"""An artifact behind HTTP with nothing but the light runtime: POST x as .npy, the answer is y as .npy.

python serve.py layer.mhsa 8000
curl --data-binary @x.npy http://localhost:8000 -o y.npy
"""

import io
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

import mhsa_compile as mhsa

MOST_BYTES = 64 * 2**20


class Handler(BaseHTTPRequestHandler):
    layer: Callable[[np.ndarray], np.ndarray]

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        if size > MOST_BYTES:
            self.send_error(413, f"expected at most {MOST_BYTES} bytes")
            return
        try:
            y = self.layer(np.load(io.BytesIO(self.rfile.read(size)), allow_pickle=False))
        except (ValueError, EOFError, mhsa.errors.MhsaError) as error:
            self.send_error(400, str(error).partition("\n")[0])
            return
        body = io.BytesIO()
        np.save(body, y)
        self.send_response(200)
        self.send_header("Content-Length", str(body.tell()))
        self.end_headers()
        self.wfile.write(body.getvalue())


def main() -> None:
    Handler.layer = mhsa.load(sys.argv[1])
    with ThreadingHTTPServer(("", int(sys.argv[2])), Handler) as server:
        print(f"http://localhost:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
